"""Moves rows in place: through the kernel, or with memmove through ctypes where there is none."""

from __future__ import annotations

import ctypes
import functools
import os
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from piecework.kvcache.change import Change
from piecework.native import library

_STREAMED_BYTES = 8 * 2**20  # where the system doesn't tell the size of the last cache


def move_rows(changes: Sequence[Change]) -> None:
    """Move all on torch's threads with the kernel or, without it, with ctypes."""
    kernels = library()
    if kernels is None:
        move_rows_by_ctypes(changes)
        return
    moves, total = array("q"), 0  # of TensorMove in native/src/move.h
    for change in changes:
        plan = change.plan
        moves.extend((change.dst.data_ptr(), plan.address, len(plan.runs)))
        total += plan.moved
    kernels.piecework_move_rows(
        ctypes.c_void_p(moves.buffer_info()[0]),
        ctypes.c_int64(len(changes)),
        ctypes.c_int64(total >= streamed_bytes()),
    )


def move_rows_by_ctypes(changes: Sequence[Change]) -> None:
    """Move all row by row from a pool of as many threads as torch has; memmove runs outside Python's lock."""
    threads = min(len(changes), torch.get_num_threads())
    if threads == 1:
        for change in changes:
            _memmove(change)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(_memmove, changes))


@functools.cache
def streamed_bytes() -> int:
    """Bytes from which on a move goes past the caches: a quarter of the last one."""
    try:
        found = os.sysconf("SC_LEVEL3_CACHE_SIZE")
    except (ValueError, OSError):
        found = 0
    return found // 4 if found > 0 else _STREAMED_BYTES


def _memmove(change: Change) -> None:
    base = change.dst.data_ptr()
    for src, dst, src_stride, dst_stride, count, size, last in change.plan.runs.tolist():
        for i in reversed(range(count)) if last else range(count):
            ctypes.memmove(base + dst + i * dst_stride, base + src + i * src_stride, size)
