"""One tensor's change of strides: what is checked, and the plan of its move."""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from piecework.errors import PieceworkError
from piecework.kvcache.layout import Rows, direction, nested, rows_of

_SUB_BYTE = re.compile(r"u?int[1-7]|\w*\dx\d|\w*_x\d")


class RelayoutError(PieceworkError, ValueError):
    """A move that is refused; `property` differs or is not allowed: `src` and `dst` are its values."""

    def __init__(self, property: str, src: Any, dst: Any, allowed: str) -> None:
        self.property = property
        self.src = src
        self.dst = dst
        super().__init__(f"{property} is {src} in the source and {dst} in the target: {allowed}")


@dataclass(frozen=True)
class Plan:
    """How tensors of one shape, with the same two layouts, move.

    `rows` is None where they move through a temporary. `moved` is in bytes. `runs` is an array of RowRun of
    native/src/move.h, [runs, 7]: bytes from a tensor's start.
    """

    rows: Rows | None
    moved: int
    runs: np.ndarray


@dataclass(frozen=True)
class Change:
    """One tensor's move from the view `src` to the view `dst` of the same memory.

    Both have the same start, type and shape, and elements of their last dimension are neighbours.
    `kv_dim_src` and `kv_dim_dst` are the dimensions that count tokens, of which the first `live` move (None:
    all). Where they differ, `src` with these two dimensions exchanged has the shape of `dst`.
    """

    src: Tensor
    dst: Tensor
    kv_dim_src: int
    kv_dim_dst: int
    live: int | None = None
    plan: Plan = field(init=False)
    moved: int = field(init=False)
    on_cpu: bool = field(init=False)
    record: bytes = field(init=False)
    """TensorMove of native/src/move.h; it points into the plan."""

    def __post_init__(self) -> None:
        src, dst = self.src, self.dst
        if src.dtype != dst.dtype:
            raise RelayoutError("dtype", src.dtype, dst.dtype, "they must be equal")
        refuse_sub_byte(src.dtype)
        if src.device != dst.device:
            raise RelayoutError("device", src.device, dst.device, "they must be equal")
        layouts = (src.shape, src.stride(), dst.shape, dst.stride())
        plan = plan_of(*layouts, self.kv_dim_src, self.kv_dim_dst, self.live, src.itemsize)
        if src.dim() and src.numel() and src.data_ptr() != dst.data_ptr():
            rule = "both must start at the same address"
            raise RelayoutError("data_ptr", hex(src.data_ptr()), hex(dst.data_ptr()), rule)
        object.__setattr__(self, "plan", plan)
        object.__setattr__(self, "moved", plan.moved)
        object.__setattr__(self, "on_cpu", src.is_cpu)
        record = struct.pack("3q", dst.data_ptr(), plan.runs.ctypes.data, len(plan.runs))
        object.__setattr__(self, "record", record)

    def views(self) -> tuple[Tensor, Tensor]:
        """The live elements, where they are and where they shall be, with the dimensions of the target."""
        src, dst = self.src, self.dst
        if self.kv_dim_src != self.kv_dim_dst:
            src = src.transpose(self.kv_dim_src, self.kv_dim_dst)
        if self.live is None or dst.dim() == 0:
            return src, dst
        return src.narrow(self.kv_dim_dst, 0, self.live), dst.narrow(self.kv_dim_dst, 0, self.live)

    def flat(self) -> Tensor:
        """All memory of both views as one dimension."""
        size = max(extent(t.shape, t.stride()) for t in (self.src, self.dst))
        return self.dst.as_strided((size,), (1,))


@functools.lru_cache(1024)
def plan_of(
    src_shape: Sequence[int],
    src: Sequence[int],
    shape: Sequence[int],
    dst: Sequence[int],
    kv_dim_src: int,
    kv_dim: int,
    live: int | None,
    width: int,
) -> Plan:
    """Check two layouts, of elements of `width` bytes, against each other and plan the move.

    Kept, since the layers of a model have their shapes in common. Raises RelayoutError, see `Change`.
    """
    rank = len(shape)
    if len(src_shape) != rank:
        raise RelayoutError("rank", len(src_shape), rank, "they must be equal")
    if rank and not (0 <= kv_dim_src < rank and 0 <= kv_dim < rank):
        raise RelayoutError("kv_dim", kv_dim_src, kv_dim, f"they must be from 0 to {rank - 1}")
    turned, strides = list(src_shape), list(src)
    if rank:
        for values in (turned, strides):
            values[kv_dim_src], values[kv_dim] = values[kv_dim], values[kv_dim_src]
    if turned != list(shape):
        rule = "they must be equal"
        if kv_dim_src != kv_dim:
            rule += f" with dimensions {kv_dim_src} and {kv_dim} exchanged"
        raise RelayoutError("shape", tuple(src_shape), tuple(shape), rule)
    if rank == 0 or 0 in shape:
        return _plan(Rows(0, (), (), ()), width)
    steps = [s[-1] if n[-1] > 1 else 1 for n, s in ((src_shape, src), (shape, dst))]
    if steps != [1, 1]:
        raise RelayoutError("stride(-1)", steps[0], steps[1], "both must be 1")
    tokens = shape[kv_dim]
    if live is not None and not 0 <= live <= tokens:
        raise RelayoutError("tokens", tokens, tokens, f"live={live} must be from 0 to {tokens}")
    target = rows_of(shape, dst, dst)
    if not nested(target.row, target.counts, target.dst):
        raise RelayoutError("stride", src, dst, "the target's elements must not share memory")
    lived = [n if i != kv_dim or live is None else live for i, n in enumerate(shape)]
    if 0 in lived:
        return _plan(Rows(0, (), (), ()), width)
    rows = rows_of(lived, strides, dst)
    # Rows of one layout are no rows of a permuted one: each of their elements has a place of its own.
    if kv_dim_src != kv_dim or direction(rows) == "temporary":
        return Plan(None, int(np.prod(lived)) * width, np.empty((0, 7), np.int64))
    return _plan(rows, width)


def _plan(rows: Rows, width: int) -> Plan:
    last = int(direction(rows) == "last to first")
    runs = [
        (
            run.src * width,
            run.dst * width,
            run.src_stride * width,
            run.dst_stride * width,
            run.length,
            rows.row * width,
            last,
        )
        for run in rows.runs()
    ]
    return Plan(rows, rows.moving * rows.row * width, np.array(runs, np.int64).reshape(-1, 7))


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last one of a layout."""
    return 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def refuse_sub_byte(dtype: torch.dtype) -> None:
    """Raise RelayoutError for types of less than a byte."""
    if _SUB_BYTE.fullmatch(str(dtype).removeprefix("torch.")):
        raise RelayoutError("dtype", dtype, dtype, "types of less than a byte have no address of their own")
