"""Compiled pieces on disk. An entry is named by a hash of everything that its content depends on."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from piecework.errors import PieceworkError
from piecework.json_text import parse_json

log = logging.getLogger("piecework.compile")

FORMAT = 1
_ABANDONED_SECONDS = 3600


class StaleEntryError(PieceworkError):
    """An entry that isn't what its name says; `path` and `reason` say which and why."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"the cache entry {path} is refused: {reason}")


def content_key(parts: Mapping[str, Any]) -> str:
    """Hash what a compiled piece depends on: plain values by name. Order doesn't matter."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


class PieceCache:
    """A folder of entries, each a payload and a small JSON header beside it.

    Several processes may use it at once, and one may die at any point: an entry is there when its header
    is, the header is put in place last, and both are put in place by a rename.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, key: str) -> tuple[Path, dict[str, Any]] | None:
        """Return the payload's path and the header's notes, or None if there is no entry.

        Raises StaleEntryError where the entry can't be trusted.
        """
        path = self.folder / f"{key}.json"
        try:
            header = parse_json(path.read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise StaleEntryError(path, f"unreadable header ({error})") from error
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise StaleEntryError(path, f"not of format {FORMAT}")
        if header.get("key") != key:
            raise StaleEntryError(path, "made for another piece, compiler or version")
        payload = self.folder / str(header.get("payload"))
        try:
            digest = _digest(payload)
        except OSError as error:
            raise StaleEntryError(path, f"its payload can't be read ({error})") from error
        if digest != header.get("sha256"):
            raise StaleEntryError(path, "its payload was changed or cut short")
        return payload, header.get("notes", {})

    def store(self, key: str, write: Callable[[Path], None], notes: Mapping[str, Any]) -> None:
        """Add an entry: `write` makes the payload's file; `notes` are plain values, found again by load.

        Entries that two processes write at once don't meet: payloads are named by their content.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._sweep()
        temporary = self.folder / f"tmp-{os.getpid()}-{time.monotonic_ns()}-{key[:16]}"
        try:
            write(temporary)
            digest = _digest(temporary)
            payload = f"{key[:32]}-{digest[:16]}.bin"
            temporary.replace(self.folder / payload)
            header = {"format": FORMAT, "key": key, "payload": payload, "sha256": digest, "notes": notes}
            temporary.write_text(json.dumps(header, indent=1))
            temporary.replace(self.folder / f"{key}.json")
        finally:
            temporary.unlink(missing_ok=True)

    def _sweep(self) -> None:
        """Remove what processes that died left half written."""
        for path in self.folder.glob("tmp-*"):
            try:
                if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                    path.unlink()
            except OSError:
                continue  # another process was faster


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
