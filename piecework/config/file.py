"""The configuration as a file: YAML, flat or in sections."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from piecework.compilation import OTHER_NAMES, CompilationConfig
from piecework.config.fields import leaves, sections
from piecework.errors import ConfigError

COMPILATION_KEYS = {*(field.name for field in fields(CompilationConfig)), *OTHER_NAMES}


def read_yaml(path: str | os.PathLike[str], cls: type) -> dict[str, Any]:
    """Read a YAML file into leaf names and values of the tree `cls`.

    Settings stand at the top (`page_size: 16`) or in their section (`cache: {page_size: 16}`), with `-`
    or `_` in their names. Raises ConfigError for a name that is unknown, in a wrong section, or given twice.
    """
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
        loaded = yaml.safe_load(text)
        twice = _first_twice(yaml.compose(text, yaml.SafeLoader))
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError("config", str(path), f"a readable YAML file ({error})") from error
    if not isinstance(loaded, dict | None):
        raise ConfigError("config", str(path), "a YAML file with a mapping at the top")
    if twice is not None:
        raise ConfigError("config", str(path), f"a YAML file with each key once; {twice} stands twice")
    return _flatten(loaded or {}, cls)


def _first_twice(node: Any) -> str | None:
    """Return a key that a mapping of a composed YAML file holds twice; loading keeps only the last."""
    pairs = node.value if getattr(node, "id", None) == "mapping" else []
    keys = [key.value for key, _ in pairs if isinstance(key.value, str)]
    here = next((key for number, key in enumerate(keys) if key in keys[:number]), None)
    return here or next((found for _, value in pairs if (found := _first_twice(value))), None)


def _unread_off(leaf: Field[Any], value: Any) -> Any:
    """Return the word `off` where a setting has it as a choice: YAML reads it as false."""
    return "off" if value is False and "off" in leaf.metadata.get("choices", ()) else value


def _instead(key: str, known: Mapping[str, Any], parts: Mapping[str, type], cls: type) -> str:
    """Say what is allowed in place of an unknown name: the setting that it is a flag of, if it is one."""
    if key in COMPILATION_KEYS:
        return f"below compilation_config, as compilation_config: {{{key}: ...}}"
    flag = "--" + key.replace("_", "-")
    for name, (leaf, _) in known.items():
        if flag in leaf.metadata.get("flags", ()):
            return f"under the setting's own name, {name}"
    names = ", ".join(sorted({*known, *parts}))
    return f"not a setting of {cls.__name__}; known: {names}"


def _flatten(loaded: Mapping[Any, Any], cls: type) -> dict[str, Any]:
    known = leaves(cls)
    parts = sections(cls)
    flat: dict[str, Any] = {}
    for name, value in loaded.items():
        key = str(name).replace("-", "_")
        if key in parts and isinstance(value, dict):
            found = _flatten(value, parts[key])
        elif key in parts and key not in known:
            if value is not None:
                raise ConfigError(key, value, "a mapping, since it is a section")
            found = {}
        elif key in known:
            found = {key: _unread_off(known[key][0], value)}
        else:
            raise ConfigError(str(name), value, _instead(key, known, parts, cls))
        for leaf in found:
            if leaf in flat:
                raise ConfigError(leaf, found[leaf], f"it stands twice in the file; first as {flat[leaf]!r}")
        flat.update(found)
    return flat
