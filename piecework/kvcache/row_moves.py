"""Moves rows in place with memmove: through the kernel, or through ctypes where there is none."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from piecework.kvcache.layout import Rows, direction
from piecework.native import library

RowMove = tuple[Tensor, Rows]
"""A dense tensor of one dimension, and the rows that move within it from its first element on."""
RowRun = tuple[int, int, int, int, int, int, int]
"""The fields of RowRun in native/src/move.cpp: addresses and bytes."""

_STREAMED_BYTES = 8 * 2**20  # where the system doesn't tell the size of the last cache


def move_rows(moves: Sequence[RowMove]) -> None:
    """Move all on torch's threads, one tensor on each, with the kernel or, without it, with ctypes."""
    kernels = library()
    if kernels is None:
        move_rows_by_ctypes(moves)
        return
    total = sum(rows.moving * rows.row * flat.itemsize for flat, rows in moves)
    call_kernel(kernels, [row_runs(*move) for move in moves], total >= streamed_bytes())


def call_kernel(kernels: ctypes.CDLL, tensors: Sequence[Sequence[RowRun]], stream: bool) -> None:
    """Copy the runs of each tensor in order, past the caches if `stream`; tensors go side by side."""
    packed = np.array([run for runs in tensors for run in runs], np.int64)
    bounds = np.cumsum([0, *map(len, tensors)], dtype=np.int64)
    kernels.piecework_move_rows(
        ctypes.c_void_p(packed.ctypes.data),
        ctypes.c_void_p(bounds.ctypes.data),
        ctypes.c_int64(len(tensors)),
        ctypes.c_int64(stream),
    )


def move_rows_by_ctypes(moves: Sequence[RowMove]) -> None:
    """Move all row by row from a pool of as many threads as torch has; memmove runs outside Python's lock."""
    threads = min(len(moves), torch.get_num_threads())
    if threads == 1:
        for move in moves:
            _memmove(move)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(_memmove, moves))


@functools.cache
def streamed_bytes() -> int:
    """Bytes from which on a move goes past the caches: a quarter of the last one."""
    try:
        found = os.sysconf("SC_LEVEL3_CACHE_SIZE")
    except (ValueError, OSError):
        found = 0
    return found // 4 if found > 0 else _STREAMED_BYTES


def _memmove(move: RowMove) -> None:
    for src, dst, src_stride, dst_stride, count, size, last in row_runs(*move):
        for i in reversed(range(count)) if last else range(count):
            ctypes.memmove(dst + i * dst_stride, src + i * src_stride, size)


def row_runs(flat: Tensor, rows: Rows) -> list[RowRun]:
    """Return the runs of a move in their order."""
    base, width = flat.data_ptr(), flat.itemsize
    last = int(direction(rows) == "last to first")
    return [
        (
            base + run.src * width,
            base + run.dst * width,
            run.src_stride * width,
            run.dst_stride * width,
            run.length,
            rows.row * width,
            last,
        )
        for run in rows.runs()
    ]
