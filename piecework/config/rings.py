"""Limits that are kept by the depth of scopes, as settings write them."""

from __future__ import annotations

from collections.abc import Sequence

from piecework.errors import ConfigError
from piecework.units import parse_size

RINGS = 4
"""Limits are kept for this many depths of scopes; deeper ones share the last."""


def ring_limits(field: str, value: str | int | Sequence[str | int]) -> tuple[int, ...]:
    """Return the limit of each ring: one for all, or four, as text with commas between them or as a list.

    Each may be written as a size (`1GiB,64M,8M,1M`). Raises ConfigError for anything else.
    """
    allowed = f"one positive number, or {RINGS} with commas between them, for the depths of scopes"
    parts = str(value).split(",") if isinstance(value, str | int) else [str(part) for part in value]
    try:
        found = [parse_size(part) for part in parts]
    except ValueError as error:
        raise ConfigError(field, value, f"{allowed} ({error})") from error
    if len(found) not in (1, RINGS) or min(found) <= 0:
        raise ConfigError(field, value, allowed)
    return tuple(found) if len(found) == RINGS else tuple(found) * RINGS
