"""Fills the attention holes: attention over the paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from piecework.kvcache import AttentionMetadata
from piecework.layers.attention import AttentionSpec
from piecework.ops.attention import paged_attention


class Layers(Protocol):
    """Keys and values by layer, as PagedKVCache has them."""

    @property
    def keys(self) -> Sequence[Tensor]:
        """Keys of each layer."""
        ...

    @property
    def values(self) -> Sequence[Tensor]:
        """Values of each layer."""
        ...


class PagedAttention:
    """Calls `paged_attention` for a layer with that layer's cache; the device's op order chooses how."""

    def __init__(self, specs: Sequence[AttentionSpec], cache: Layers, op_order: Sequence[str]) -> None:
        self._specs = specs
        self._cache = cache
        self._order = op_order

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, metadata: AttentionMetadata
    ) -> None:
        """Write k and v [T, Hkv, D] into the layer's cache and q's [T, Hq, D] attention into `out`."""
        spec = self._specs[layer]
        args = (
            q,
            k,
            v,
            out,
            self._cache.keys[layer],
            self._cache.values[layer],
            metadata.slots,
            metadata.page_table,
            metadata.query_starts,
            metadata.context_lengths,
            metadata.max_query_length,
            spec.scale,
            spec.window,
        )
        paged_attention.resolve(self._order, *args).run(*args)
