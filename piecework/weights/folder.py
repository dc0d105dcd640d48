"""The configuration files of a folder in the Hugging Face layout."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

from piecework.cache import cache_root, try_read_json, try_write
from piecework.errors import ModelError
from piecework.json_text import parse_json

log = logging.getLogger(__name__)


def read_json(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file; ModelError where there is none."""
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path}: no such file") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: has to hold a JSON object, not {type(value).__name__}")
    return value


def read_config(folder: Path, cache_dir: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """A folder's config.json, with what it leaves out filled in as `transformers` would.

    A `model_type` that `transformers` doesn't know gives the file as it is. What was filled in is kept, see
    `cache_root`: to import `transformers` takes longer than anything else that a worker's start does itself.
    """
    raw = read_json(folder / "config.json")
    try:
        filled = _filled(folder, cache_dir)
    except Exception as error:  # transformers has no common base for what a strange config raises
        log.warning("transformers cannot read %s, so its defaults are not filled in: %s", folder, error)
        return raw
    # Names that this model type doesn't have are kept too: a later check can then refuse them by name.
    return {**raw, **filled}


def _filled(folder: Path, cache_dir: str | os.PathLike[str] | None) -> dict[str, Any]:
    """What `transformers` makes of a config.json, by the file's content and the version of `transformers`."""
    content = (folder / "config.json").read_bytes()
    key = hashlib.sha256(f"{version('transformers')}|".encode() + content).hexdigest()[:24]
    kept = cache_root(cache_dir) / "configs" / f"{key}.json"
    found = try_read_json(kept)
    if isinstance(found, dict):
        return found
    config = _auto_config(folder)
    try:
        text = json.dumps(config)
    except (TypeError, ValueError):  # no other process can be told
        return config
    try_write(kept, text)
    filled: dict[str, Any] = parse_json(text)  # the same the first time as later: keys are texts
    return filled


def _auto_config(folder: Path) -> dict[str, Any]:
    from transformers import AutoConfig

    # Never the code that a folder may bring along, and no question on the terminal whether to run it.
    config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    return {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}


def read_generation_config(folder: Path) -> dict[str, Any]:
    """A folder's generation_config.json; empty where there is none."""
    path = folder / "generation_config.json"
    return read_json(path) if path.exists() else {}
