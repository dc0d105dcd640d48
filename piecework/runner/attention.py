"""Fills the attention holes: attention over the paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from piecework.kvcache import AttentionMetadata, PagedKVCache
from piecework.layers.attention import AttentionSpec
from piecework.ops.attention import paged_attention
from piecework.ops.attention_int8 import paged_attention_int8


class PagedAttention:
    """Calls `paged_attention` for a layer with that layer's cache; the device's op order chooses how."""

    def __init__(self, specs: Sequence[AttentionSpec], cache: PagedKVCache, op_order: Sequence[str]) -> None:
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
            *self._cache.layer(layer),
            metadata.slots,
            metadata.page_table,
            metadata.query_starts,
            metadata.context_lengths,
            metadata.max_query_length,
            spec.scale,
            spec.window,
        )
        op = paged_attention_int8 if self._cache.key_scales else paged_attention
        op.resolve(self._order, *args).run(*args)
