"""The in-place move: keys and values of one buffer get other strides, as a cache's capacity changes.

Both layouts start at the same address, and only live tokens move. `Change` says what is checked. No memory
is allocated but in three cases, each a temporary as large as is said:

* strides that grow in one dimension and shrink in another: the live elements;
* a sequence dimension that changes its place: the live elements;
* the method `blocks` where a row moves by less than a 32nd of its length: at most 1 MiB at a time.

Profiled as the timer `relayout` and the bytes `relayout.moved` and `relayout.temporary`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from piecework.errors import PieceworkError
from piecework.kvcache.block_moves import move_blocks
from piecework.kvcache.layout import Rows, direction, nested, rows_of
from piecework.kvcache.row_moves import RowMove, move_rows, move_rows_by_ctypes
from piecework.profile import Profile

_SUB_BYTE = re.compile(r"u?int[1-7]|\w*\dx\d|\w*_x\d")


def _all_blocks(moves: Sequence[RowMove]) -> None:
    for flat, rows in moves:
        move_blocks(flat, rows)


METHODS: Mapping[str, Callable[[Sequence[RowMove]], None]] = {
    "rows": move_rows,
    "ctypes": move_rows_by_ctypes,
    "blocks": _all_blocks,
}
"""How rows move. A device names its best, `Device.relayout`; `blocks` works on every device."""


class RelayoutError(PieceworkError, ValueError):
    """A move that is refused; `property` differs or is not allowed: `src` and `dst` are its values."""

    def __init__(self, property: str, src: Any, dst: Any, allowed: str) -> None:
        self.property = property
        self.src = src
        self.dst = dst
        super().__init__(f"{property} is {src} in the source and {dst} in the target: {allowed}")


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

    def __post_init__(self) -> None:
        src, dst = self.src, self.dst
        if src.dtype != dst.dtype:
            raise RelayoutError("dtype", src.dtype, dst.dtype, "they must be equal")
        _refuse_sub_byte(src.dtype)
        if src.device != dst.device:
            raise RelayoutError("device", src.device, dst.device, "they must be equal")
        if src.dim() != dst.dim():
            raise RelayoutError("rank", src.dim(), dst.dim(), "they must be equal")
        if src.dim() and not (0 <= self.kv_dim_src < src.dim() and 0 <= self.kv_dim_dst < dst.dim()):
            rule = f"they must be from 0 to {src.dim() - 1}"
            raise RelayoutError("kv_dim", self.kv_dim_src, self.kv_dim_dst, rule)
        if self.turned.shape != dst.shape:
            rule = "they must be equal"
            if self.kv_dim_src != self.kv_dim_dst:
                rule += f" with dimensions {self.kv_dim_src} and {self.kv_dim_dst} exchanged"
            raise RelayoutError("shape", tuple(src.shape), tuple(dst.shape), rule)
        if src.dim() == 0 or src.numel() == 0:
            return
        if src.data_ptr() != dst.data_ptr():
            rule = "both must start at the same address"
            raise RelayoutError("data_ptr", hex(src.data_ptr()), hex(dst.data_ptr()), rule)
        steps = [t.stride(-1) if t.shape[-1] > 1 else 1 for t in (src, dst)]
        if steps != [1, 1]:
            raise RelayoutError("stride(-1)", steps[0], steps[1], "both must be 1")
        tokens = dst.shape[self.kv_dim_dst]
        if self.live is not None and not 0 <= self.live <= tokens:
            raise RelayoutError("tokens", tokens, tokens, f"live={self.live} must be from 0 to {tokens}")
        if _overlaps(dst):
            rule = "the target's elements must not share memory"
            raise RelayoutError("stride", src.stride(), dst.stride(), rule)

    @property
    def turned(self) -> Tensor:
        """`src` with the dimensions of `dst`."""
        same = self.kv_dim_src == self.kv_dim_dst
        return self.src if same else self.src.transpose(self.kv_dim_src, self.kv_dim_dst)

    def views(self) -> tuple[Tensor, Tensor]:
        """The live elements, where they are and where they shall be."""
        if self.live is None or self.dst.dim() == 0:
            return self.turned, self.dst
        return self.turned.narrow(self.kv_dim_dst, 0, self.live), self.dst.narrow(
            self.kv_dim_dst, 0, self.live
        )


def relayout(changes: Sequence[Change], method: str = "blocks", profile: Profile | None = None) -> int:
    """Make all changes, of tensors that share no memory, and return the bytes that moved.

    `method` is one of `METHODS`. On a device with streams the copies are queued, not waited for.
    """
    profile = profile or Profile()
    moves: list[RowMove] = []
    apart: list[tuple[Tensor, Tensor]] = []
    moved = 0
    with profile.time("relayout"):
        for change in changes:
            src, dst = change.views()
            if src.dim() == 0 or src.numel() == 0:
                continue
            if method != "blocks" and src.device.type != "cpu":
                raise RelayoutError("device", src.device, dst.device, f"the method {method} is for cpu")
            # Rows of one layout are no rows of a permuted one: each of their elements has a place of its own.
            turned = change.kv_dim_src != change.kv_dim_dst
            rows = None if turned else rows_of(tuple(dst.shape), src.stride(), dst.stride())
            if rows is None or direction(rows) == "temporary":
                apart.append((src, dst))
                moved += dst.numel() * dst.itemsize
            elif rows.moving:
                moves.append((_flat(src, dst), rows))
                moved += rows.moving * rows.row * dst.itemsize
        for src, dst in apart:
            profile.add_bytes("relayout.temporary", src.numel() * src.itemsize)
            dst.copy_(src.clone(memory_format=torch.contiguous_format))
        if moves:
            METHODS[method](moves)
    profile.add_bytes("relayout.moved", moved)
    return moved


def copy_tensor_in_place(
    src: Tensor,
    dst: Tensor,
    kv_dim_src: int,
    kv_dim_dst: int,
    *,
    live: int | None = None,
    method: str = "blocks",
    profile: Profile | None = None,
) -> int:
    """Move one tensor; see `Change` and `relayout`."""
    return relayout([Change(src, dst, kv_dim_src, kv_dim_dst, live)], method, profile)


def move_in_place(
    buffer: Tensor,
    shape: Sequence[int],
    src_strides: Sequence[int],
    dst_strides: Sequence[int],
    dtype: torch.dtype,
    *,
    kv_dim: int = 0,
    live: int | None = None,
    method: str = "blocks",
    profile: Profile | None = None,
) -> int:
    """Move the tensor of `shape` and `dtype` at the start of a contiguous buffer to other strides.

    Strides count elements. Returns the bytes that moved. Raises RelayoutError, see `Change`, also where a
    layout does not fit into the buffer.
    """
    _refuse_sub_byte(dtype)
    if not len(shape) == len(src_strides) == len(dst_strides):
        rule = f"as many as the shape's {len(shape)}"
        raise RelayoutError("number of strides", len(src_strides), len(dst_strides), rule)
    room = buffer.numel() * buffer.itemsize // dtype.itemsize
    needed = [_extent(shape, strides) for strides in (src_strides, dst_strides)]
    if max(needed) > room:
        raise RelayoutError("extent in elements", needed[0], needed[1], f"the buffer has {room}")
    if not buffer.is_contiguous():
        raise RelayoutError("stride", buffer.stride(), buffer.stride(), "the buffer must be contiguous")
    flat = buffer.view(-1).view(torch.uint8)[: room * dtype.itemsize].view(dtype)
    src, dst = (flat.as_strided(tuple(shape), tuple(s)) for s in (src_strides, dst_strides))
    return copy_tensor_in_place(src, dst, kv_dim, kv_dim, live=live, method=method, profile=profile)


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last one of a layout."""
    return 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def _flat(src: Tensor, dst: Tensor) -> Tensor:
    """All memory of both views as one dimension."""
    extent = max(_extent(t.shape, t.stride()) for t in (src, dst))
    return dst.as_strided((extent,), (1,))


def _overlaps(dst: Tensor) -> bool:
    rows: Rows = rows_of(tuple(dst.shape), dst.stride(), dst.stride())
    return not nested(rows.row, rows.counts, rows.dst)


def _refuse_sub_byte(dtype: torch.dtype) -> None:
    if _SUB_BYTE.fullmatch(str(dtype).removeprefix("torch.")):
        raise RelayoutError("dtype", dtype, dtype, "types of less than a byte have no address of their own")
