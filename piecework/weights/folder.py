"""The configuration files of a folder in the Hugging Face layout."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

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


def read_config(folder: Path) -> dict[str, Any]:
    """A folder's config.json, with what it leaves out filled in as `transformers` would.

    A `model_type` that `transformers` doesn't know gives the file as it is.
    """
    raw = read_json(folder / "config.json")
    try:
        filled: dict[str, Any] = _auto_config(folder)
    except Exception as error:  # transformers has no common base for what a strange config raises
        log.warning("transformers cannot read %s, so its defaults are not filled in: %s", folder, error)
        return raw
    # Names that this model type doesn't have are kept too: a later check can then refuse them by name.
    return {**raw, **filled}


def _auto_config(folder: Path) -> dict[str, Any]:
    from transformers import AutoConfig

    # Never the code that a folder may bring along, and no question on the terminal whether to run it.
    config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    return dict(config.to_dict())


def read_generation_config(folder: Path) -> dict[str, Any]:
    """A folder's generation_config.json; empty where there is none."""
    path = folder / "generation_config.json"
    return read_json(path) if path.exists() else {}
