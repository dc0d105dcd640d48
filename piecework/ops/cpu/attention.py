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


def _has_rows(x: Tensor) -> bool:
    """Whether the heads of each row of x [T, H, D] lie one after the other."""
    return x.stride(2) == 1 and x.stride(1) == x.shape[2]


def supports(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    page_table: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
    max_query_length: int,
    scale: float,
    window: int,
) -> bool:
    """Whether the kernel can run the call: one float type, head_dim a multiple of 8, rows without gaps."""
    kind = q.dtype
    return (
        kind in FLOATS
        and q.shape[2] % 8 == 0
        and k.dtype == v.dtype == out.dtype == k_cache.dtype == v_cache.dtype == kind
        and _has_rows(q)
        and _has_rows(k)
        and _has_rows(v)
        and _has_rows(out)
        and k_cache.is_contiguous()
        and v_cache.is_contiguous()
        and library() is not None
    )


@paged_attention.implement("cpu")
def paged_attention_cpu(*args: Any) -> None:
    """Write the step's keys and values, then attend; see the reference for the arguments."""
    if not supports(*args):
        paged_attention_sdpa(*args)
        return
    q, k, v, out, k_cache, v_cache, slots, page_table, query_starts, context_lengths = args[:10]
    _, scale, window = args[10:]
    index = [_index(x) for x in (slots, page_table, query_starts, context_lengths)]
    rows, heads, dim = q.shape
    _paged_attention(
        *(x.data_ptr() for x in (q, k, v, out, k_cache, v_cache, *index)),
        *(x.stride(0) for x in (q, k, v, out)),
        rows,
        context_lengths.shape[0],
        page_table.shape[1],
        heads,
        k_cache.shape[1],
        dim,
        k_cache.shape[2],
        window,
        TYPES[q.dtype],
        scale,
    )


def _index(x: Tensor) -> Tensor:
    return x.to(torch.int32).contiguous()
