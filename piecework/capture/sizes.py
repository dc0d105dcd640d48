"""Which sizes a phase is captured at: the defaults, and the size that a batch is padded to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import chain

from piecework.errors import ConfigError

DECODE_SIZES = (1, 2, 4, 8, 12, *range(16, 257, 8))
"""Batch sizes, a sequence each."""
PREFILL_SIZES = tuple(
    chain(
        range(4, 33, 4), range(48, 257, 16), range(288, 513, 32), range(576, 1025, 64), range(1280, 4097, 256)
    )
)
"""Numbers of tokens."""


def default_sizes(phase: str, limit: int) -> tuple[int, ...]:
    """Return the default sizes of `phase` (decode or prefill) up to `limit`.

    `limit`, the largest batch that can come, is among them where it lies below the largest default.
    """
    every = DECODE_SIZES if phase == "decode" else PREFILL_SIZES
    sizes = [size for size in every if size <= limit]
    return tuple(sizes) if limit in sizes or limit > every[-1] else (*sizes, limit)


def check_sizes(field: str, sizes: Sequence[int], limit: int, limit_name: str) -> tuple[int, ...]:
    """Return sizes that a user gave, sorted and each once; ConfigError where one isn't in 1 to `limit`."""
    for size in sizes:
        if size < 1 or size > limit:
            raise ConfigError(field, list(sizes), f"sizes from 1 to {limit_name}={limit}, and {size} is not")
    return tuple(sorted(set(sizes)))


def padded_size(sizes: Sequence[int], rows: int, *, exact: bool = False) -> int | None:
    """Return the smallest of the sorted `sizes` that has room for `rows`; None above the largest.

    `exact`: None for all other sizes than `rows`, too.
    """
    i = bisect_left(sizes, rows)
    return sizes[i] if i < len(sizes) and not (exact and sizes[i] != rows) else None
