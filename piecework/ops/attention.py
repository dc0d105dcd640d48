"""`attention`, which a model emits, and `paged_attention`, which fills its place over a paged KV cache."""

from __future__ import annotations

import torch
from torch import Tensor

from piecework.ops.registry import define


def visible(queries: int, context: int, window: int, device: torch.device) -> Tensor:
    """Mask [queries, context]: which keys the last `queries` of `context` tokens may see.

    Token i sees the keys up to its own; with a window w > 0 only the last w of them.
    """
    row = torch.arange(context - queries, context, device=device).unsqueeze(1)
    key = torch.arange(context, device=device).unsqueeze(0)
    seen = key <= row
    return seen & (key > row - window) if window > 0 else seen


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
    """Softmax(scale * q k^T) v in float32 for one sequence, in plain torch.

    q [T, Hq, D] are the last T of S tokens, k and v [S, Hkv, D] -> [T, Hq, D] in q's dtype. Hq is a
    multiple of Hkv: consecutive query heads share a key head (Ainslie et al. 2023, arXiv:2305.13245).
    """
    group = q.shape[1] // k.shape[1]
    keys = k.float().repeat_interleave(group, 1)
    values = v.float().repeat_interleave(group, 1)
    scores = torch.einsum("thd,shd->hts", q.float(), keys) * scale
    scores = scores.masked_fill(~visible(q.shape[0], k.shape[0], window, q.device), float("-inf"))
    return torch.einsum("hts,shd->thd", scores.softmax(-1), values).to(q.dtype)


def _attention(q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer: int, scale: float, window: int) -> None:
    """Causal attention over the T tokens of one sequence, written into `out`.

    q, out [T, Hq, D]; k, v [T, Hkv, D]. This meaning holds where nothing fills the hole: the runner
    puts attention over its KV cache in this place. `layer` tells the filler which cache to use.
    """
    out.copy_(attend(q, k, v, scale, window))


def _attention_fake(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer: int, scale: float, window: int
) -> None:
    return None


def write_cache(cache: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Put rows [T, Hkv, D] into cache [pages, Hkv, page_size, D] at slots [T] (page * size + offset)."""
    page_size = cache.shape[2]
    cache[slots // page_size, :, slots % page_size] = rows


def read_cache(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    """Gather the first `length` tokens of pages [n] from cache [pages, Hkv, size, D] -> [Hkv, length, D]."""
    # index_select is fast along the first dimension only: along another it copies the whole cache.
    return cache.index_select(0, pages).transpose(0, 1).flatten(1, 2)[:, :length]


def _paged_attention(
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
    """Write this step's keys and values into the cache, then attend over each sequence's pages.

    q, out [T, Hq, D]; k, v [T, Hkv, D]; k_cache, v_cache [pages, Hkv, page_size, D]; slots [T] say where
    each row's key goes; sequence b owns the rows query_starts[b] to query_starts[b + 1], which are the
    last of its context_lengths[b] tokens, and the pages page_table[b]. Index tensors are integers,
    page_table [B, P] is padded with the dummy page 0. No sequence has more than max_query_length rows.
    Rows after the last sequence are padding and are set to zero.
    """
    starts, lengths = query_starts.tolist(), context_lengths.tolist()
    valid = starts[-1]
    write_cache(k_cache, k[:valid], slots[:valid])
    write_cache(v_cache, v[:valid], slots[:valid])
    for b, length in enumerate(lengths):
        rows = slice(starts[b], starts[b + 1])
        pages = page_table[b, : -(-length // k_cache.shape[2])]
        keys = read_cache(k_cache, pages, length).transpose(0, 1)
        values = read_cache(v_cache, pages, length).transpose(0, 1)
        out[rows] = attend(q[rows], keys, values, scale, window)
    out[valid:] = 0


def paged_attention_fake(*args: object) -> None:
    return None


attention = define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor(a!) out, int layer, float scale, int window) -> ()",
    _attention,
    _attention_fake,
    mutates=True,
)
paged_attention = define(
    "paged_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!) k_cache, Tensor(c!) v_cache, "
    "Tensor slots, Tensor page_table, Tensor query_starts, Tensor context_lengths, "
    "int max_query_length, float scale, int window) -> ()",
    _paged_attention,
    paged_attention_fake,
    mutates=True,
)
