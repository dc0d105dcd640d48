"""Where downloads and parsed files are kept, and how a file gets there whole or not at all."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

from piecework.json_text import parse_json

log = logging.getLogger(__name__)


def cache_root(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """The cache's folder: `cache_dir`, else $PIECEWORK_CACHE, else ~/.cache/piecework (may not exist yet)."""
    chosen = cache_dir or os.environ.get("PIECEWORK_CACHE") or Path.home() / ".cache" / "piecework"
    return Path(chosen).expanduser()


def file_key(path: Path, version: int) -> str:
    """A name for what was made of `path` as it is now, from its place, size, time of change and `version`."""
    stat = path.stat()
    text = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{version}"
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def write_atomic(path: Path, text: str) -> None:
    """Write a text file so that a reader sees all of it or none, whoever else writes it at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def try_write(path: Path, text: str) -> None:
    """`write_atomic`, where a cache that cannot be written (a read-only disk, say) is only logged."""
    try:
        write_atomic(path, text)
    except OSError as error:
        log.warning("cannot write the cache file %s (%s); it is made again next time", path, error)


def try_read_json(path: Path) -> Any:
    """The value in a cached JSON file, or None where the file is missing or damaged."""
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("the cache file %s is not readable (%s); it is made again", path, error)
        return None
