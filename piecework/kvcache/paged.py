"""The paged KV cache: its tensors, and the index arithmetic from positions to slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from piecework.devices import Device
from piecework.ops.attention_int8 import SCALE_DTYPE

Ints = NDArray[np.integer]


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
    Who moves a layer sets new tuples; whoever knows addresses sees from that that they changed.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: Device,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        shapes = [(num_pages, s.num_kv_heads, page_size, s.head_dim) for s in layers]
        kinds = ("keys", "values", *(("key_scales", "value_scales") if dtype is torch.int8 else ()))
        self._names = [f"{kind}.{i}" for kind in kinds for i in range(len(layers))]
        self.keys = tuple(device.zeros(shape, dtype) for shape in shapes)
        self.values = tuple(device.zeros(shape, dtype) for shape in shapes)
        scaled = [shape[:3] for shape in shapes if dtype is torch.int8]
        self.key_scales = tuple(device.zeros(shape, SCALE_DTYPE) for shape in scaled)
        self.value_scales = tuple(device.zeros(shape, SCALE_DTYPE) for shape in scaled)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages of all layers."""
        return sum(t.nbytes for t in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name, `keys.<layer>` and so on."""
        tensors = (*self.keys, *self.values, *self.key_scales, *self.value_scales)
        return dict(zip(self._names, tensors, strict=True))

    def layer(self, index: int) -> tuple[Tensor, ...]:
        """Return what attention of a layer reads: keys, values, and in int8 the scales of both."""
        found = (self.keys[index], self.values[index])
        return (*found, self.key_scales[index], self.value_scales[index]) if self.key_scales else found


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
