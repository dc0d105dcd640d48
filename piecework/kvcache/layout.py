"""A change of strides as rows: what moves together, in which order, and whether it can move in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Direction = Literal["nothing", "first to last", "last to first", "temporary"]


class Run(NamedTuple):
    """Rows with one stride: row i moves from `src` + i * `src_stride` to `dst` + i * `dst_stride`."""

    src: int
    dst: int
    length: int
    src_stride: int
    dst_stride: int


@dataclass(frozen=True)
class Rows:
    """Rows of `row` elements; `counts` and strides are of the dimensions around them, outermost first.

    All numbers count elements. Both layouts start at the same address.
    """

    row: int
    counts: tuple[int, ...]
    src: tuple[int, ...]
    dst: tuple[int, ...]

    @property
    def moving(self) -> int:
        """Number of rows that get another address."""
        total = staying = 1
        for count, src, dst in zip(self.counts, self.src, self.dst, strict=True):
            total *= count
            staying *= count if src == dst else 1
        return total - staying

    def runs(self) -> Iterator[Run]:
        """Yield the rows that move, in the order in which they must, along the innermost dimension."""
        if self.counts:
            yield from self._runs(0, 0, 0)

    def _runs(self, level: int, src: int, dst: int) -> Iterator[Run]:
        count, src_stride, dst_stride = self.counts[level], self.src[level], self.dst[level]
        if level == len(self.counts) - 1:
            if src == dst and src_stride == dst_stride:
                return
            stays = int(src == dst)
            yield Run(
                src + stays * src_stride, dst + stays * dst_stride, count - stays, src_stride, dst_stride
            )
            return
        forward = range(count)
        for i in reversed(forward) if direction(self) == "last to first" else forward:
            yield from self._runs(level + 1, src + i * src_stride, dst + i * dst_stride)


def fold_row(shape: Sequence[int], src: Sequence[int], dst: Sequence[int]) -> tuple[int, int]:
    """Fold the longest run of trailing dimensions that are dense in both layouts.

    Returns how many dimensions are left outside, and the elements of one row.
    """
    left, row = len(shape), 1
    while left and (shape[left - 1] == 1 or src[left - 1] == dst[left - 1] == row):
        left -= 1
        row *= shape[left]
    return left, row


def rows_of(shape: Sequence[int], src: Sequence[int], dst: Sequence[int]) -> Rows:
    """Describe the move of a tensor of `shape`, none of it 0, from strides `src` to strides `dst`.

    Dimensions are put in the order of their source strides, which is that of memory, and two that follow
    each other at one distance in both layouts become one: transposed values [1, H, E, S] are H * E rows.
    """
    left, row = fold_row(shape, src, dst)
    outside = [place for place in zip(shape[:left], src, dst, strict=False) if place[0] > 1]
    outside.sort(key=lambda place: place[1], reverse=True)
    merged: list[tuple[int, int, int]] = []
    for count, src_stride, dst_stride in outside:
        if merged and merged[-1][1:] == (count * src_stride, count * dst_stride):
            count *= merged.pop()[0]
        merged.append((count, src_stride, dst_stride))
    counts, sources, targets = zip(*merged, strict=True) if merged else ((), (), ())
    return Rows(row, counts, sources, targets)


def nested(row: int, counts: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether rows lie one behind the other in the order of their indices, and none overlaps another."""
    span = row
    for count, stride in zip(reversed(counts), reversed(strides), strict=True):
        if stride < span:
            return False
        span += stride * (count - 1)
    return True


def direction(rows: Rows) -> Direction:
    """Say in which order rows can move without overwriting one that has not moved yet.

    Where strides grow, every row moves up, onto those behind it: the last one goes first. Where they
    shrink, the first one goes first. With strides of both kinds, or dimensions in another order, there is
    no such order of rows in general, and they go through a temporary.
    """
    if rows.src == rows.dst:
        return "nothing"
    if not (nested(rows.row, rows.counts, rows.src) and nested(rows.row, rows.counts, rows.dst)):
        return "temporary"
    grows = any(dst > src for src, dst in zip(rows.src, rows.dst, strict=True))
    shrinks = any(dst < src for src, dst in zip(rows.src, rows.dst, strict=True))
    if grows and shrinks:
        return "temporary"
    return "last to first" if grows else "first to last"
