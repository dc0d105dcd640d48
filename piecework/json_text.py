"""JSON that others wrote: whatever is wrong with it is a ValueError, and lines end where JSON's do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any


def parse_json(text: str | bytes, hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Return the value of a JSON text; ValueError where it is none, or nested deeper than Python goes.

    `hook` makes each object of its pairs.
    """
    try:
        return json.loads(text, object_pairs_hook=hook)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def parse_unique(text: str) -> Any:
    """Like parse_json, and a ValueError for an object that holds a key twice, of which one would be lost."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"the key {key!r} stands twice, as {found[key]!r} and {value!r}")
            found[key] = value
        return found

    return parse_json(text, unique)


def numbered_lines(text: str) -> Iterator[tuple[int, str]]:
    """Number the lines of JSON lines from 1, without the empty ones.

    Only line feeds end them: a text in JSON may hold U+2028 and its like, where `splitlines` would cut.
    """
    return ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())
