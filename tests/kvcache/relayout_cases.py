"""Buffers whose every element tells where it was, and what a move must leave in them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

DTYPES = (torch.int8, torch.float16, torch.bfloat16, torch.float32)
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def strides_of(shape: Sequence[int], kv_dim: int, capacity: int) -> tuple[int, ...]:
    """Strides of a cache with room for `capacity` tokens."""
    room = [capacity if i == kv_dim else n for i, n in enumerate(shape)]
    return tuple(math.prod(room[i + 1 :]) for i in range(len(room)))


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def filled(count: int, dtype: torch.dtype) -> Tensor:
    """Bits that repeat with a period that no stride has; NaNs among them."""
    integer = INTEGERS[dtype.itemsize]
    return (torch.arange(count) * 40503 % 65521).to(integer).view(dtype)


def bits(tensor: Tensor) -> Tensor:
    """The tensor as integers, so that NaNs compare."""
    return tensor.view(INTEGERS[tensor.itemsize])


def expected(
    buffer: Tensor, shape: Sequence[int], src: Sequence[int], dst: Sequence[int], kv_dim: int, live: int
) -> tuple[Tensor, int]:
    """The whole buffer after the move, element by element, and how many elements got another place."""
    after, moved = buffer.clone(), 0
    lived = [live if i == kv_dim else n for i, n in enumerate(shape)]
    for index in torch.cartesian_prod(*map(torch.arange, lived)).view(-1, len(lived)):
        from_ = int(sum(index * torch.tensor(src)))
        to = int(sum(index * torch.tensor(dst)))
        after[to] = buffer[from_]
        moved += from_ != to
    return after, moved


def expected_by_views(
    buffer: Tensor, shape: Sequence[int], src: Sequence[int], dst: Sequence[int], kv_dim: int, live: int
) -> tuple[Tensor, int]:
    """The same by a copy between two buffers, fast enough for large shapes."""
    after, places = buffer.clone(), torch.arange(buffer.numel())
    lived = [live if i == kv_dim else n for i, n in enumerate(shape)]
    after.as_strided(lived, dst).copy_(buffer.as_strided(lived, src))
    moved = places.as_strided(lived, dst) != places.as_strided(lived, src)
    return after, int(moved.sum())
