"""The paged KV cache: its tensors, and the index arithmetic from positions to slots."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from piecework.devices import Device
from piecework.devices.reservation import Reservation
from piecework.errors import DeviceError
from piecework.ops.attention_int8 import SCALE_DTYPE

Ints = NDArray[np.integer]
PAGES_AT_ONCE = 64  # a copy goes through a temporary of so many pages of one layer


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer keeps per token."""

    num_kv_heads: int
    head_dim: int

    def page_bytes(self, page_size: int, dtype: torch.dtype) -> int:
        """Bytes of one page of this layer, keys and values; in int8 each token and head has a scale."""
        scale = SCALE_DTYPE.itemsize if dtype is torch.int8 else 0
        return 2 * self.num_kv_heads * page_size * (self.head_dim * dtype.itemsize + scale)


class PagedKVCache:
    """Keys and values of all layers on one device, in pages.

    `keys[layer]` and `values[layer]` are [num_pages, kv_heads, page_size, head_dim]. Pages are the
    outermost dimension, so that a cache with more pages has the same strides, and each head's page is
    one contiguous block. All memory is zero at first: a masked NaN would still poison a softmax. In int8,
    `key_scales` and `value_scales` are [num_pages, kv_heads, page_size]; otherwise there are none.
    Tensors have addresses for `max_pages`, of which the first `num_pages` have memory (`resize`); only a
    device that reserves addresses has more than it begins with.
    Who moves a layer sets new tuples; whoever knows addresses sees from that that they changed.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: Device,
        max_pages: int | None = None,
    ) -> None:
        self.num_pages = num_pages
        self.max_pages = max(num_pages, max_pages or num_pages)
        self.device = device
        self._reserved: list[tuple[Reservation, int]] = []  # with the bytes of a page
        self.page_size = page_size
        self.dtype = dtype
        shapes = [(num_pages, s.num_kv_heads, page_size, s.head_dim) for s in layers]
        kinds = ("keys", "values", *(("key_scales", "value_scales") if dtype is torch.int8 else ()))
        self._names = [f"{kind}.{i}" for kind in kinds for i in range(len(layers))]
        self.keys = tuple(self._zeros(shape, dtype) for shape in shapes)
        self.values = tuple(self._zeros(shape, dtype) for shape in shapes)
        scaled = [shape[:3] for shape in shapes if dtype is torch.int8]
        self.key_scales = tuple(self._zeros(shape, SCALE_DTYPE) for shape in scaled)
        self.value_scales = tuple(self._zeros(shape, SCALE_DTYPE) for shape in scaled)

    @property
    def longest(self) -> int:
        """The longest prompt plus output that it has room for."""
        return (self.num_pages - 1) * self.page_size

    @property
    def nbytes(self) -> int:
        """Bytes of all pages of all layers."""
        return sum(t[: self.num_pages].nbytes for t in self.tensors().values())

    @property
    def resizable(self) -> bool:
        """Whether the device gives and takes back memory at addresses that stay."""
        return len(self._reserved) == len(self._names)

    @property
    def fixed_because(self) -> str:
        """Why one that is not resizable keeps its size."""
        return f"the device {self.device.name} can't give back a part of the cache's memory"

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name, `keys.<layer>` and so on."""
        tensors = (*self.keys, *self.values, *self.key_scales, *self.value_scales)
        return dict(zip(self._names, tensors, strict=True))

    def layer(self, index: int) -> tuple[Tensor, ...]:
        """Return what attention of a layer reads: keys, values, and in int8 the scales of both."""
        found = (self.keys[index], self.values[index])
        return (*found, self.key_scales[index], self.value_scales[index]) if self.key_scales else found

    def resize(self, num_pages: int) -> None:
        """Give memory, all zero, to pages up to `num_pages`, and take it from those behind.

        Raises DeviceError where the device has no memory left, or can't do it at all.
        """
        if not self.resizable:
            raise DeviceError(self.device.name, "memory", "it has no addresses without memory")
        done: list[tuple[Reservation, int]] = []
        for reservation, size in self._reserved:
            try:
                _change(reservation, self.num_pages * size, num_pages * size)
            except DeviceError:
                for earlier, own in done:
                    _change(earlier, num_pages * own, self.num_pages * own)
                raise
            done.append((reservation, size))
        self.num_pages = num_pages

    def copy_pages(self, moves: Mapping[int, int]) -> int:
        """Copy whole pages, to none that is also copied from; returns the bytes."""
        if not moves:
            return 0
        index = [self.device.place(torch.tensor(list(pages))) for pages in (moves.values(), moves.keys())]
        to, from_ = (part.split(PAGES_AT_ONCE) for part in index)
        tensors = self.tensors().values()
        for tensor in tensors:
            for new, old in zip(to, from_, strict=True):
                tensor.index_copy_(0, new, tensor.index_select(0, old))
        return sum(tensor[0].nbytes for tensor in tensors) * len(moves)

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros of a shape that begins with `num_pages`, with addresses for `max_pages`."""
        size = math.prod(shape[1:]) * dtype.itemsize
        reservation = self.device.reserve(self.max_pages * size)
        if reservation is None:
            return self.device.zeros(shape, dtype)
        reservation.commit(0, self.num_pages * size)
        self._reserved.append((reservation, size))
        return reservation.memory.view(dtype).view(self.max_pages, *shape[1:])


def _change(reservation: Reservation, old: int, new: int) -> None:
    if new > old:
        reservation.commit(old, new)
    elif new < old:
        reservation.decommit(new, old)


def page_bytes(layers: Sequence[LayerShape], page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page over all layers."""
    return sum(layer.page_bytes(page_size, dtype) for layer in layers)


def pages_for(tokens: int, page_size: int) -> int:
    """Number of pages that hold `tokens` tokens."""
    return -(-tokens // page_size)


def slots_of(table: Ints, owners: Ints, positions: Ints, page_size: int) -> Ints:
    """Return the slots [T] (page * page_size + offset) of positions [T] of the sequences `owners` [T], whose
    pages are the rows of `table` [S, pages].
    """
    return table[owners, positions // page_size] * page_size + positions % page_size
