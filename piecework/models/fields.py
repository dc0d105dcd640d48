"""Typed reading of a checkpoint's config.json, with errors that name the field, the value and the rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piecework.errors import ConfigError


class Fields:
    """A mapping from config.json. `null` counts as absent; `where` is put before names in errors.

    A field without a default is required. Every reader raises `ConfigError` on a wrong value.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self.values = values
        self.where = where

    def get(self, name: str) -> Any:
        """Return the raw value, or None."""
        return self.values.get(name)

    def error(self, name: str, allowed: str) -> ConfigError:
        """Make the error for the field `name`."""
        return ConfigError(self.where + name, self.values.get(name), allowed)

    def integer(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        """Read an integer of at least `minimum`."""
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.error(name, f"an integer of at least {minimum}")
        return value

    def number(self, name: str, default: float | None = None, *, or_zero: bool = False) -> float:
        """Read a positive number, or zero where `or_zero` allows it."""
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, "a number")
        if not (value > 0 or (or_zero and value == 0)):
            raise self.error(name, "a positive number, or 0" if or_zero else "a positive number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Read true or false."""
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """Read an integer or a list of integers; absent gives none."""
        value = self.values.get(name)
        if value is None:
            return ()
        items = value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in items):
            raise self.error(name, "an integer or a list of integers, none negative")
        return tuple(items)
