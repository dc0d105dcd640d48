"""Sizes in bytes, as people write them: `512M`, `1GiB`, `1.5 GB`."""

from __future__ import annotations

import re

_FACTORS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _FACTORS[_letter] = _FACTORS[_letter + "IB"] = 1024**_power
    _FACTORS[_letter + "B"] = 1000**_power

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str) -> int:
    """Return the bytes that `text` states.

    `K M G T` and `KiB MiB ...` are powers of 1024, `KB MB ...` of 1000. Letter case does not matter.
    Raises ValueError, with the allowed forms, for anything else.
    """
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is not a size in bytes such as 536870912, 512M, 1GiB or 1.5GB")
    return int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor


def format_size(count: float) -> str:
    """Return `count` bytes in the largest binary unit that leaves a number of at least one: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
