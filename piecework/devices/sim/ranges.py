"""Free ranges of addresses: first fit, neighbours merged."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

Range = tuple[int, int]
"""From the first byte up to, not including, the second number."""


def subtract(left: Sequence[Range], right: Sequence[Range]) -> tuple[Range, ...]:
    """Bytes of `left` that are not in `right`; both sorted and without overlaps."""
    rest: list[Range] = []
    for start, stop in left:
        for cut_start, cut_stop in right:
            if cut_stop <= start or stop <= cut_start:
                continue
            if start < cut_start:
                rest.append((start, cut_start))
            start = cut_stop
        if start < stop:
            rest.append((start, stop))
    return tuple(rest)


def intersect(left: Sequence[Range], right: Sequence[Range]) -> tuple[Range, ...]:
    """Bytes that are in both."""
    return subtract(left, subtract(left, right))


class FreeRanges:
    """A set of bytes, as sorted ranges that neither touch nor overlap."""

    def __init__(self) -> None:
        self._ranges: list[Range] = []

    @property
    def total(self) -> int:
        """Bytes in the set."""
        return sum(stop - start for start, stop in self._ranges)

    def snapshot(self) -> tuple[Range, ...]:
        """Return the ranges as they are now."""
        return tuple(self._ranges)

    def take(self, size: int) -> int | None:
        """Take `size` bytes from the first range that has them; None where none has."""
        for i, (start, stop) in enumerate(self._ranges):
            if stop - start >= size:
                if stop - start == size:
                    del self._ranges[i]
                else:
                    self._ranges[i] = (start + size, stop)
                return start
        return None

    def add(self, start: int, stop: int) -> None:
        """Put bytes back, which must not be in the set."""
        i = bisect_left(self._ranges, (start, stop))
        if i < len(self._ranges) and self._ranges[i][0] == stop:
            stop = self._ranges.pop(i)[1]
        if i > 0 and self._ranges[i - 1][1] == start:
            start = self._ranges[i - 1][0]
            self._ranges[i - 1] = (start, stop)
        else:
            self._ranges.insert(i, (start, stop))
