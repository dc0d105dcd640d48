"""`attention` and `paged_attention` on the CPU: the library's kernel, and torch where that can't run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from piecework.native import library
from piecework.native.types import TYPES
from piecework.ops.attention import attention, paged_attention
from piecework.ops.cpu.kernels import FLOATS, Kernel
from piecework.ops.sdpa import attention_sdpa, paged_attention_sdpa

attention.implement("cpu")(attention_sdpa)

_paged_attention = Kernel(
    "paged_attention",
    "q k v out k_cache v_cache slots page_table query_starts context_lengths",
    "q_stride k_stride v_stride out_stride rows sequences table_stride heads kv_heads head_dim page_size "
    "window type",
    "scale",
)


def supports(q: Tensor, k: Tensor, v: Tensor, out: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether the kernel can run the call: one float type, head_dim a multiple of 8, rows without gaps."""
    kind, dim = q.dtype, q.shape[2]
    return (
        kind in FLOATS
        and dim % 8 == 0
        and k.dtype is v.dtype is out.dtype is k_cache.dtype is v_cache.dtype is kind
        and q.stride()[1:] == k.stride()[1:] == v.stride()[1:] == out.stride()[1:] == (dim, 1)
        and k_cache.is_contiguous()
        and v_cache.is_contiguous()
        and library() is not None
    )


@paged_attention.implement("cpu")
def paged_attention_cpu(*args: Any) -> None:
    """Write the step's keys and values, then attend; see the reference for the arguments."""
    if not supports(*args[:6]):
        paged_attention_sdpa(*args)
        return
    q, k, v, out, k_cache, v_cache, slots, page_table, query_starts, context_lengths, _, scale, window = args
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
        scale,
    )


def index_of(x: Tensor) -> Tensor:
    """Return x as the kernel reads it; that costs more than to see that nothing needs to be done."""
    return x if x.dtype is torch.int32 and x.is_contiguous() else x.to(torch.int32).contiguous()
