"""The in-place move: keys and values of one buffer get other strides, as a cache's capacity changes.

Both layouts start at the same address, and only live tokens move. `Change` says what is checked. No memory
is allocated but in three cases, each a temporary as large as is said:

* strides that grow in one dimension and shrink in another: the live elements;
* a sequence dimension that changes its place: the live elements;
* the method `blocks` where a row moves by less than a 32nd of its length: at most 1 MiB at a time.

Profiled as the timer `relayout` and the bytes `relayout.moved` and `relayout.temporary`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from piecework.kvcache.block_moves import move_blocks
from piecework.kvcache.change import Change, RelayoutError, extent, refuse_sub_byte
from piecework.kvcache.row_moves import move_rows, move_rows_by_ctypes
from piecework.profile import Profile

__all__ = ["METHODS", "Change", "RelayoutError", "copy_tensor_in_place", "move_in_place", "relayout"]

METHODS: Mapping[str, Callable[[Sequence[Change]], None]] = {
    "rows": move_rows,
    "ctypes": move_rows_by_ctypes,
    "blocks": move_blocks,
}
"""How rows move. A device names its best, `Device.relayout`; `blocks` works on every device."""

_UNPROFILED = Profile()


def relayout(changes: Sequence[Change], method: str = "blocks", profile: Profile | None = None) -> int:
    """Make all changes, of tensors that share no memory, and return the bytes that moved.

    `method` is one of `METHODS`. On a device with streams the copies are queued, not waited for.
    """
    profile = profile or _UNPROFILED
    with profile.time("relayout"):
        moving = [change for change in changes if change.moved]
        if method != "blocks":
            _refuse_other_devices(moving, method)
        apart = [change for change in moving if change.plan.rows is None]
        for change in apart:
            src, dst = change.views()
            profile.add_bytes("relayout.temporary", change.moved)
            dst.copy_(src.clone(memory_format=torch.contiguous_format))
        in_place = [change for change in moving if change.plan.rows is not None] if apart else moving
        if in_place:
            METHODS[method](in_place)
    moved = sum([change.moved for change in moving])
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
    refuse_sub_byte(dtype)
    if not len(shape) == len(src_strides) == len(dst_strides):
        rule = f"as many as the shape's {len(shape)}"
        raise RelayoutError("number of strides", len(src_strides), len(dst_strides), rule)
    room = buffer.numel() * buffer.itemsize // dtype.itemsize
    needed = [extent(shape, strides) for strides in (src_strides, dst_strides)]
    if max(needed) > room:
        raise RelayoutError("extent in elements", needed[0], needed[1], f"the buffer has {room}")
    if not buffer.is_contiguous():
        raise RelayoutError("stride", buffer.stride(), buffer.stride(), "the buffer must be contiguous")
    flat = buffer.view(-1).view(torch.uint8)[: room * dtype.itemsize].view(dtype)
    src, dst = (flat.as_strided(tuple(shape), tuple(s)) for s in (src_strides, dst_strides))
    return copy_tensor_in_place(src, dst, kv_dim, kv_dim, live=live, method=method, profile=profile)


def _refuse_other_devices(changes: Sequence[Change], method: str) -> None:
    for change in changes:
        if not change.on_cpu:
            device = change.dst.device
            raise RelayoutError("device", device, device, f"the method {method} is for cpu")
