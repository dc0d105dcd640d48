"""Reads the files that evaluations run on; a line that can't be used is refused with its number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from piecework.errors import ConfigError
from piecework.json_text import numbered_lines, parse_json

JSON_LINES = (".jsonl", ".ndjson")


def read_lines(field: str, path: str) -> list[tuple[int, dict[str, Any]]]:
    """Return (number of the line, object) of a file with a JSON object on each line; empty lines are none.

    Raises ConfigError, naming `field`, the file and the line.
    """
    found = []
    for number, line in numbered_lines(_text(field, path)):
        try:
            value = parse_json(line)
        except ValueError as error:
            raise refused(field, path, number, f"it is not JSON ({error})") from error
        if not isinstance(value, dict):
            raise refused(field, path, number, f"it holds a {type(value).__name__}, not an object")
        found.append((number, value))
    if not found:
        raise ConfigError(field, path, "a file with at least one JSON object")
    return found


def text_field(field: str, path: str, number: int, item: dict[str, Any], name: str) -> str:
    """Return the text under `name` of a line's object, or refuse the line."""
    value = item.get(name)
    if not isinstance(value, str) or not value.strip():
        raise refused(field, path, number, f"{name!r} is {value!r}, and has to be a text")
    return value


def read_text(field: str, path: str) -> str:
    """Return a file's text; of JSON lines all strings of each object, joined.

    An object's strings stand in their order, on a line each; objects are parted by an empty line.
    """
    if Path(path).suffix.lower() not in JSON_LINES:
        text = _text(field, path)
        if not text.strip():
            raise ConfigError(field, path, "a file with text in it")
        return text
    documents = []
    for number, item in read_lines(field, path):
        texts = [value for value in item.values() if isinstance(value, str)]
        if not texts:
            raise refused(field, path, number, f"none of its fields ({', '.join(item) or 'none'}) is a text")
        documents.append("\n".join(texts))
    return "\n\n".join(documents)


def refused(field: str, path: str, number: int, why: str) -> ConfigError:
    """Return the error for line `number`, counted from 1."""
    return ConfigError(field, path, f"line {number} cannot be used: {why}")


def _text(field: str, path: str) -> str:
    if not path:
        raise ConfigError(field, path, "a file; it has to be given")
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(field, path, f"a readable text file ({error})") from error
