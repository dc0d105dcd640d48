"""`attention` and `paged_attention` on the CPU: the library's kernel, and torch where that can't run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from piecework.native import library
from piecework.native.types import TYPES
from piecework.ops.attention import attention, paged_attention
from piecework.ops.attention_int8 import SCALE_DTYPE, paged_attention_int8
from piecework.ops.cpu.kernels import FLOATS, Kernel
from piecework.ops.sdpa import attention_sdpa, paged_attention_sdpa

attention.implement("cpu")(attention_sdpa)

_paged_attention = Kernel(
    "paged_attention",
    "q k v out k_cache v_cache k_scales v_scales slots page_table query_starts context_lengths",
    "q_stride k_stride v_stride out_stride rows sequences table_stride heads kv_heads head_dim page_size "
    "window type cache_type",
    "scale",
)


def supports(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, k_cache: Tensor, v_cache: Tensor, *scales: Tensor
) -> bool:
    """Whether the kernel can run the call: one float type, head_dim a multiple of 8, rows without gaps; with
    the scales of keys and values, the cache is int8.
    """
    kind, dim = q.dtype, q.shape[2]
    return (
        kind in FLOATS
        and dim % 8 == 0
        and k.dtype is v.dtype is out.dtype is kind
        and k_cache.dtype is v_cache.dtype is (torch.int8 if scales else kind)
        and all(x.dtype is SCALE_DTYPE and x.is_contiguous() for x in scales)
        and q.stride()[1:] == k.stride()[1:] == v.stride()[1:] == out.stride()[1:] == (dim, 1)
        and k_cache.is_contiguous()
        and v_cache.is_contiguous()
        and library() is not None
    )


@paged_attention.implement("cpu")
def paged_attention_cpu(*args: Any) -> None:
    """Write the step's keys and values, then attend; see the reference for the arguments."""
    if supports(*args[:6]):
        _call(args[:6], (), args[6:])
    else:
        paged_attention_sdpa(*args)


@paged_attention_int8.implement("cpu")
def paged_attention_int8_cpu(*args: Any) -> None:
    """The same over a cache of int8."""
    if supports(*args[:8]):
        _call(args[:6], args[6:8], args[8:])
    else:
        paged_attention_int8.reference(*args)


def _call(tensors: Sequence[Tensor], scales: Sequence[Tensor], rest: Sequence[Any]) -> None:
    q, k, v, out, k_cache, v_cache = tensors
    slots, page_table, query_starts, context_lengths, _, scale, window = rest
    # Names, since a copy must live until the kernel is done.
    slots, page_table, query_starts, context_lengths = map(
        index_of, (slots, page_table, query_starts, context_lengths)
    )
    rows, heads, dim = q.shape
    _, kv_heads, page_size, _ = k_cache.shape
    sequences, pages = page_table.shape
    _paged_attention(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        out.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        *([x.data_ptr() for x in scales] or (0, 0)),
        slots.data_ptr(),
        page_table.data_ptr(),
        query_starts.data_ptr(),
        context_lengths.data_ptr(),
        q.stride(0),
        k.stride(0),
        v.stride(0),
        out.stride(0),
        rows,
        sequences,
        pages,
        heads,
        kv_heads,
        dim,
        page_size,
        window,
        TYPES[q.dtype],
        TYPES[k_cache.dtype],
        scale,
    )


def index_of(x: Tensor) -> Tensor:
    """Return x as the kernel reads it; that costs more than to see that nothing needs to be done."""
    return x if x.dtype is torch.int32 and x.is_contiguous() else x.to(torch.int32).contiguous()
