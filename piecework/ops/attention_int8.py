"""`paged_attention_int8`: `paged_attention` over a cache of int8, with a scale for each token and head."""

from __future__ import annotations

import torch
from torch import Tensor

from piecework.ops.attention import attend, paged_attention_fake, write_cache
from piecework.ops.registry import define

SCALE_DTYPE = torch.bfloat16


def quantize_heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [T, H, D] as int8, and the scales [T, H]: each head's largest number through 127.

    The scale is rounded to bfloat16 before it divides. A head with NaN or infinity, which have no int8, is
    zeros with that scale.
    """
    x = x.float()
    largest = x.abs().amax(-1)
    scales = (largest / 127).to(SCALE_DTYPE)
    by = scales.float()
    usable = (by > 0) & largest.isfinite()
    rounded = (x / by.where(usable, 1.0).unsqueeze(-1)).round().clamp(-128, 127)
    return rounded.where(usable.unsqueeze(-1), 0.0).to(torch.int8), scales


def write_int8(cache: Tensor, scales: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Put rows [T, Hkv, D] into cache [pages, Hkv, page_size, D] and scales [pages, Hkv, page_size]."""
    values, by = quantize_heads(rows)
    write_cache(cache, values, slots)
    write_cache(scales, by, slots)


def read_int8(cache: Tensor, scales: Tensor, pages: Tensor, length: int) -> Tensor:
    """Gather the first `length` tokens of pages [n] as float32 [length, Hkv, D]."""
    found = cache.index_select(0, pages).float() * scales.index_select(0, pages).float().unsqueeze(-1)
    return found.transpose(0, 1).flatten(1, 2)[:, :length].transpose(0, 1)


def _paged_attention_int8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scales: Tensor,
    v_scales: Tensor,
    slots: Tensor,
    page_table: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
    max_query_length: int,
    scale: float,
    window: int,
) -> None:
    """As `paged_attention`, but k_cache and v_cache are int8, and k_scales and v_scales
    [pages, Hkv, page_size] bfloat16 are what each head of a token is multiplied by.

    The step's own keys and values are read from the cache too, as they were rounded.
    """
    starts, lengths = query_starts.tolist(), context_lengths.tolist()
    valid = starts[-1]
    write_int8(k_cache, k_scales, k[:valid], slots[:valid])
    write_int8(v_cache, v_scales, v[:valid], slots[:valid])
    for b, length in enumerate(lengths):
        rows = slice(starts[b], starts[b + 1])
        pages = page_table[b, : -(-length // k_cache.shape[2])]
        keys = read_int8(k_cache, k_scales, pages, length)
        values = read_int8(v_cache, v_scales, pages, length)
        out[rows] = attend(q[rows], keys, values, scale, window)
    out[valid:] = 0


paged_attention_int8 = define(
    "paged_attention_int8(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!) k_cache, "
    "Tensor(c!) v_cache, Tensor(d!) k_scales, Tensor(e!) v_scales, Tensor slots, Tensor page_table, "
    "Tensor query_starts, Tensor context_lengths, int max_query_length, float scale, int window) -> ()",
    _paged_attention_int8,
    paged_attention_fake,
    mutates=True,
)
