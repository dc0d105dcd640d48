"""`attention` and `paged_attention` over torch's scaled dot product attention, for devices without a kernel.

Sequences that decode (one query row) run together: their pages are gathered into padded batches, in
which the query heads of a group stand as rows against their shared key head. Sequences with more rows
run one by one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from piecework.ops.attention import read_cache, visible, write_cache

# A padded batch of decoding sequences may read this many times the tokens that they hold.
_PADDING_LIMIT = 1.5


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
    """q [T, Hq, D] against k, v [Hkv, S, D] -> [T, Hq, D]; the T rows are the last of the S tokens."""
    rows, context = q.shape[0], k.shape[1]
    plain = rows == context and (window == 0 or window >= context)
    mask = None if plain else visible(rows, context, window, q.device)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k[None],
        v[None],
        attn_mask=mask,
        is_causal=plain,
        scale=scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


def attention_sdpa(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer: int, scale: float, window: int
) -> None:
    """Attend over one sequence without a cache; see the reference for the shapes."""
    out.copy_(_attend(q, k.transpose(0, 1), v.transpose(0, 1), scale, window))


def paged_attention_sdpa(
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
    """Write the step's keys and values, then attend; see the reference for the shapes."""
    starts, lengths = query_starts.tolist(), context_lengths.tolist()
    valid, page_size = starts[-1], k_cache.shape[2]
    write_cache(k_cache, k[:valid], slots[:valid])
    write_cache(v_cache, v[:valid], slots[:valid])
    decoding = []
    for b, length in enumerate(lengths):
        if starts[b + 1] - starts[b] == 1:
            decoding.append(b)
            continue
        rows = slice(starts[b], starts[b + 1])
        pages = page_table[b, : -(-length // page_size)]
        keys, values = read_cache(k_cache, pages, length), read_cache(v_cache, pages, length)
        out[rows] = _attend(q[rows], keys, values, scale, window)
    for batch in _padded_batches(decoding, lengths):
        index = torch.tensor(batch, device=q.device)
        rows_b = query_starts[index].long()
        out[rows_b] = _decode(
            q[rows_b], k_cache, v_cache, page_table[index], context_lengths[index], scale, window
        )
    out[valid:] = 0


def _padded_batches(sequences: list[int], lengths: list[int]) -> list[list[int]]:
    """Group sequences of like length, so that padding each group to its longest wastes little."""
    batches: list[list[int]] = []
    total = 0
    for b in sorted(sequences, key=lengths.__getitem__):
        padded = lengths[b] * (len(batches[-1]) + 1) if batches else 0
        if batches and padded <= _PADDING_LIMIT * (total + lengths[b]):
            batches[-1].append(b)
            total += lengths[b]
        else:
            batches.append([b])
            total = lengths[b]
    return batches


def _decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    """One query row per sequence: q [B, Hq, D], page_table [B, P], lengths [B] -> [B, Hq, D]."""
    batch, heads, dim = q.shape
    kv_heads, page_size = k_cache.shape[1], k_cache.shape[2]
    longest = int(lengths.max())
    pages = page_table[:, : -(-longest // page_size)].flatten()

    def gather(cache: Tensor) -> Tensor:
        rows = cache.index_select(0, pages).view(batch, -1, kv_heads, page_size, dim)
        return rows.transpose(1, 2).flatten(2, 3)[:, :, :longest]

    mask = None
    if batch > 1 or 0 < window < longest:
        key = torch.arange(longest, device=q.device)
        seen = key < lengths.unsqueeze(1)
        if window > 0:
            seen &= key >= lengths.unsqueeze(1) - window
        mask = seen[:, None, None]
    grouped = q.view(batch, kv_heads, heads // kv_heads, dim)
    out = F.scaled_dot_product_attention(
        grouped, gather(k_cache), gather(v_cache), attn_mask=mask, scale=scale
    )
    return out.reshape(batch, heads, dim)
