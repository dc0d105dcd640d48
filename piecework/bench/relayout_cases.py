"""What `bench relayout` times: caches of one shape, their move, and what it is compared with."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from piecework.bench.options import RELAYOUT_MOVES
from piecework.devices import Device
from piecework.kvcache.relayout import Change, relayout
from piecework.native import library

_PROCESS = Path("/proc/self")


@dataclass(frozen=True)
class Shape:
    """Keys [1, heads, tokens, head_dim] and values [1, heads, head_dim, tokens] of `layers` layers."""

    heads: int
    head_dim: int
    tokens: int
    dtype: torch.dtype
    move: str
    layers: int

    @property
    def capacities(self) -> tuple[int, int]:
        """Tokens that there is room for before and after."""
        before, after = RELAYOUT_MOVES[self.move]
        least = min(before, after)
        return -(-self.tokens * before // least), -(-self.tokens * after // least)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of one tensor's live tokens."""
        return self.heads * self.head_dim * self.tokens * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes that a case takes: the larger layout of all tensors, and the other buffer of the copies."""
        larger = self.heads * self.head_dim * max(self.capacities) * self.dtype.itemsize
        return 2 * self.layers * (larger + self.tensor_bytes)


class Case:
    """Buffers of one shape. What it runs can be run again: it moves as many bytes each time."""

    def __init__(self, shape: Shape, device: Device) -> None:
        self._device = device
        larger = shape.heads * shape.head_dim * max(shape.capacities)
        self.changes: list[Change] = []
        self._spare: list[Tensor] = []
        for _ in range(shape.layers):
            for kv_dim in (2, 3):
                form = [1, shape.heads, shape.tokens, shape.head_dim]
                form[2:] = form[2:] if kv_dim == 2 else form[:1:-1]
                buffer = device.zeros((larger,), shape.dtype)
                buffer.fill_(1)  # memory that was never written to is none yet
                views = []
                for capacity in shape.capacities:
                    room = [capacity if i == kv_dim else n for i, n in enumerate(form)]
                    views.append(buffer.as_strided(form, [math.prod(room[i + 1 :]) for i in range(4)]))
                self.changes.append(Change(views[0], views[1], kv_dim, kv_dim))
                spare = device.zeros((math.prod(form),), shape.dtype)
                self._spare.append(spare.fill_(1))
        self.moved = relayout(self.changes, device.relayout)

    def wrong(self, method: str) -> bool:
        """Whether the move leaves other values than a copy between two buffers; looks at one layer."""
        for change in self.changes[:2]:
            values = torch.randint(-99, 99, change.src.shape, dtype=torch.int8, device=change.src.device)
            change.src.copy_(values)
        expected = [change.src.clone() for change in self.changes[:2]]
        relayout(self.changes, method)
        pairs = zip(self.changes, expected, strict=False)
        return not all(torch.equal(change.dst, wanted) for change, wanted in pairs)

    def move(self, method: str) -> Callable[[], object]:
        """The move in place."""
        return lambda: relayout(self.changes, method)

    def copy(self) -> Callable[[], object]:
        """One copy of as many bytes from buffer to buffer, each tensor's as a whole."""
        share = [self.moved * s.nbytes // sum(t.nbytes for t in self._spare) for s in self._spare]
        kernels = library()
        if self._device.relayout == "rows" and kernels is not None:
            runs = [
                (change.src.data_ptr(), spare.data_ptr(), 0, 0, 1, size, 0)
                for change, spare, size in zip(self.changes, self._spare, share, strict=True)
            ]
            return _copies(kernels, runs)
        flat = [c.src.as_strided((c.src.numel(),), (1,)) for c in self.changes]
        counts = [size // spare.itemsize for size, spare in zip(share, self._spare, strict=True)]

        def copies() -> None:
            for source, spare, count in zip(flat, self._spare, counts, strict=True):
                spare[:count].copy_(source[:count])

        return copies

    def two_copies(self) -> Callable[[], object]:
        """The rows that move, out to another buffer and back: what one does without a move in place."""
        kernels = library()
        if self._device.relayout == "rows" and kernels is not None:
            out, back = [], []
            for change, spare in zip(self.changes, self._spare, strict=True):
                ((src, dst, src_step, dst_step, count, size, _),) = change.plan.runs.tolist()
                base, there = change.src.data_ptr(), spare.data_ptr()
                out.append((base + src, there, src_step, size, count, size, 0))
                back.append((there, base + dst, size, dst_step, count, size, 0))
            first, second = _copies(kernels, out), _copies(kernels, back)
            return lambda: (first(), second())

        def out_and_back() -> None:
            for change, spare in zip(self.changes, self._spare, strict=True):
                first = int(change.kv_dim_src == 2)  # a head's keys are one row, and the first one stays
                whole = spare.view(change.src.shape)[:, first:]
                whole.copy_(change.src[:, first:])
                change.dst[:, first:].copy_(whole)

        return out_and_back


def _copies(kernels: ctypes.CDLL, runs: Sequence[tuple[int, ...]]) -> Callable[[], object]:
    """Each run by memcpy from buffer to buffer, shared evenly by all threads; the call is made ready."""
    packed = np.array(runs, np.int64)
    arguments = ctypes.c_void_p(packed.ctypes.data), ctypes.c_int64(len(packed))

    def copy() -> None:
        assert packed.size  # what the kernel reads stays
        kernels.piecework_copy_rows(*arguments)

    return copy


def extra_bytes(device: Device, run: Callable[[], object]) -> int | None:
    """Measure by how many bytes a call raises the memory in use at its peak; None where nobody tells.

    On CUDA torch's allocator tells it, elsewhere Linux, where the process's peak can be reset (proc(5)).
    """
    if device.torch_device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return int(torch.cuda.max_memory_allocated() - before)
    try:
        (_PROCESS / "clear_refs").write_text("5")
        before = _status("VmRSS")
        run()
        return max(0, _status("VmHWM") - before)
    except (OSError, StopIteration):
        return None


def _status(name: str) -> int:
    lines = (_PROCESS / "status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))
