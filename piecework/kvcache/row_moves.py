"""Moves rows in place: through the kernel, or with memmove through ctypes where there is none."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from piecework.kvcache.change import Change
from piecework.native import library

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_FAR = 2 * 2**20
"""By how many bytes a row moves whose target isn't in a cache, from what was read just before."""
_NEVER = 2**63 - 1
_STREAMED_BYTES = 8 * 2**20  # where the system doesn't tell the size of the last cache


def move_rows(changes: Sequence[Change]) -> None:
    """Move all on torch's threads with the kernel or, without it, with ctypes."""
    kernels = library()
    if kernels is None:
        move_rows_by_ctypes(changes)
        return
    moves = b"".join([change.record for change in changes])
    large = sum([change.moved for change in changes]) >= streamed_bytes()
    far = ctypes.c_int64(_FAR if large else _NEVER)
    kernels.piecework_move_rows(moves, ctypes.c_int64(len(changes)), far)


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
def streamed_bytes(caches: Path = _CACHES) -> int:
    """Bytes from which on moves may go past the caches: three quarters of the last one, as Linux tells it."""
    found = 0
    try:
        for cache in caches.glob("index*"):
            kib = (cache / "size").read_text().strip().removesuffix("K")
            found = max(found, int(kib) * 1024)
    except (ValueError, OSError):
        found = 0
    return found * 3 // 4 if found else _STREAMED_BYTES


def _memmove(change: Change) -> None:
    base = change.dst.data_ptr()
    for src, dst, src_stride, dst_stride, count, size, last in change.plan.runs.tolist():
        for i in reversed(range(count)) if last else range(count):
            ctypes.memmove(base + dst + i * dst_stride, base + src + i * src_stride, size)
