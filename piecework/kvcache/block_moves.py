"""Moves rows in place by strided copies whose sources and targets don't overlap: no kernel is needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from piecework.kvcache.change import Change
from piecework.kvcache.layout import Rows, Run, direction

_MOST_CHUNKS = 32
_BOUNCE_BYTES = 2**20


class Block(NamedTuple):
    """`length` pieces of `size` elements with one stride. `bounce`: source and target overlap."""

    src: int
    dst: int
    length: int
    src_stride: int
    dst_stride: int
    size: int
    bounce: bool = False


def blocks_of(rows: Rows, bounce: int) -> Iterator[Block]:
    """Split a move into copies that are made in this order.

    Of n rows that grow from stride s to stride d, those from about n * s / d on have targets behind all
    sources: one copy moves them, then the same is true of those before. So a move takes about
    log(n) / log(d / s) copies. A row that lands on itself moves in chunks as long as the distance; where
    that would be more than 32, in chunks of `bounce` elements that go through a temporary.
    """
    last_first = direction(rows) == "last to first"
    for run in rows.runs():
        yield from (_growing if last_first else _shrinking)(run, rows.row, bounce)


def _growing(run: Run, row: int, bounce: int) -> Iterator[Block]:
    src, dst, count, src_stride, dst_stride = run
    while count:
        end = src + (count - 1) * src_stride + row  # of the sources that have not moved
        first = max(0, -(-(end - dst) // dst_stride))
        if first < count:
            from_, to = src + first * src_stride, dst + first * dst_stride
            yield Block(from_, to, count - first, src_stride, dst_stride, row)
            count = first
            continue
        count -= 1
        from_, to = src + count * src_stride, dst + count * dst_stride
        yield from reversed(list(_chunks(from_, to, row, to - from_, bounce)))


def _shrinking(run: Run, row: int, bounce: int) -> Iterator[Block]:
    src, dst, count, src_stride, dst_stride = run
    first = 0
    while first < count:
        from_, to = src + first * src_stride, dst + first * dst_stride
        after = min(count, (from_ - dst - row) // dst_stride + 1)  # targets up to here end before the sources
        if after > first:
            yield Block(from_, to, after - first, src_stride, dst_stride, row)
            first = after
            continue
        first += 1
        yield from _chunks(from_, to, row, from_ - to, bounce)


def _chunks(src: int, dst: int, row: int, distance: int, bounce: int) -> Iterator[Block]:
    overlap = row > distance * _MOST_CHUNKS
    size = bounce if overlap else distance
    for start in range(0, row, size):
        part = min(size, row - start)
        yield Block(src + start, dst + start, 1, 0, 0, part, overlap)


def move_blocks(changes: Sequence[Change]) -> None:
    """Move each tensor by copies within its memory, one after the other."""
    for change in changes:
        assert change.plan.rows is not None
        flat = change.flat()
        base = flat.storage_offset()
        for block in blocks_of(change.plan.rows, max(1, _BOUNCE_BYTES // flat.itemsize)):
            shape = (block.length, block.size)
            source = flat.as_strided(shape, (block.src_stride, 1), base + block.src)
            target = flat.as_strided(shape, (block.dst_stride, 1), base + block.dst)
            target.copy_(source.clone() if block.bounce else source)
