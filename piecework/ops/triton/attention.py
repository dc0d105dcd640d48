"""`paged_attention` where every sequence has one row, split along the context, KV write included."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from piecework.ops.attention import paged_attention
from piecework.ops.triton.available import usable_float
from piecework.ops.triton.rows import power_of_two

_MAX_DIM = 256
_MOST_PARTS = 32
_PART_TOKENS = 128  # a part of the context below this isn't worth a program of its own
_PROGRAMS_PER_PROCESSOR = 2


@cache
def _processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; the interpreter runs programs one by one, as if it had few."""
    if device.type != "cuda":
        return 8
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _parts(programs: int, tokens: int, processors: int) -> int:
    """Into how many parts, a power of two, contexts of at most `tokens` tokens are split.

    Depends on shapes alone, so a captured batch keeps its number; the kernel shares out the true lengths.
    """
    wanted = _PROGRAMS_PER_PROCESSOR * processors // programs
    limit = min(_MOST_PARTS, wanted, -(-tokens // _PART_TOKENS))
    return 1 << (max(1, limit).bit_length() - 1)


def _block_n(dim: int, itemsize: int) -> int:
    """Tokens of a step of the loop; float32, which is multiplied without tensor cores, has room for few."""
    if itemsize == 4:
        return 16
    return 64 if dim <= 128 else 32


def _supports(
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
    dim = q.shape[2]
    return (
        max_query_length == 1
        and dim <= _MAX_DIM
        and usable_float(q, k, v, out, k_cache, v_cache)
        and all(t.stride(-1) == 1 for t in (q, k, v))
        and out.stride(2) == 1
        and out.stride(1) == dim
        and k_cache.stride() == v_cache.stride()
        and k_cache.stride()[2:] == (dim, 1)
        and page_table.stride(1) == 1
        and all(t.stride(0) == 1 for t in (slots, context_lengths))
    )


@paged_attention.implement("triton", supports=_supports)
def paged_attention_decode(
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
) -> None:
    """Write the step's keys and values, then attend; see the reference for the shapes.

    Sequence b has row b, and one of length 0 is padding, whose key and value are not written.
    """
    from piecework.ops.triton.kernels.attention import combine_kernel, decode_kernel

    rows, heads, dim = q.shape
    if rows == 0:
        return
    sequences, width = page_table.shape
    kv_heads, page_size = k_cache.shape[1:3]
    tokens = width * page_size if window <= 0 else min(width * page_size, window)
    parts = _parts(rows * kv_heads, tokens, _processors(q.device))
    partial = lse = None
    if parts > 1:
        partial = torch.empty((rows, heads, parts, dim), dtype=torch.float32, device=q.device)
        lse = torch.empty((rows, heads, parts), dtype=torch.float32, device=q.device)
    block = power_of_two(dim)
    decode_kernel[(rows, kv_heads, parts)](
        q,
        k,
        v,
        out,
        k_cache,
        v_cache,
        slots,
        page_table,
        context_lengths,
        partial,
        lse,
        sequences,
        scale,
        window,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        out.stride(0),
        page_table.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        PAGE=page_size,
        GROUP=heads // kv_heads,
        DIM=dim,
        BLOCK_G=max(16, power_of_two(heads // kv_heads)),
        BLOCK_N=_block_n(block, q.itemsize),
        BLOCK_D=max(16, block),
        num_warps=4,
        num_stages=3,
    )
    if parts > 1:
        combine_kernel[(rows, heads)](
            partial,
            lse,
            out,
            out.stride(0),
            PARTS=parts,
            DIM=dim,
            BLOCK_D=block,
            num_warps=4,
        )
