"""`paged_attention` on NPUs, through npu_fused_infer_attention_score.

It reads the cache as it lies here, [pages, Hkv, page_size, D], where pages have a multiple of 128 tokens. Its
lengths are arguments from the host: a captured call keeps those of its capture until they are updated.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from piecework.ops.attention import paged_attention as paged_attention_op
from piecework.ops.attention import write_cache
from piecework.ops.npu.quantize import HALVES
from piecework.ops.npu.vendor import available, call

_PAGE_STEP, _LARGEST_PAGE = 128, 512
_HEAD_STEP, _LARGEST_HEAD, _LARGEST_GROUP = 16, 512, 64
_CAUSAL_SIZE = 2048  # the mask of sparse mode 3 always has this size
_NO_MASK, _CAUSAL = 0, 3
UPDATED: dict[str, str | None] = {"context_lengths": "actual_seq_lengths_kv", "query_starts": None}
"""Host arguments of a captured step, and what of the function must be replaced before a replay.

A captured step has a row per sequence, whatever the batch, so where rows start doesn't change.
"""


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
    heads, dim = q.shape[1:]
    kv_heads, page_size = k_cache.shape[1:3]
    return (
        available()
        and window == 0
        and q.dtype in HALVES
        and k_cache.dtype == v_cache.dtype == q.dtype
        and page_size % _PAGE_STEP == 0
        and page_size <= _LARGEST_PAGE
        and dim % _HEAD_STEP == 0
        and dim <= _LARGEST_HEAD
        and heads // kv_heads <= _LARGEST_GROUP
    )


@paged_attention_op.implement("npu", supports=_supports)
def paged_attention(
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
    """See the reference. A step of single rows is one call; of longer ones there is a call a sequence."""
    starts, lengths = query_starts.tolist(), context_lengths.tolist()
    valid = starts[-1]
    write_cache(k_cache, k[:valid], slots[:valid])
    write_cache(v_cache, v[:valid], slots[:valid])
    shared = {
        "num_heads": q.shape[1],
        "num_key_value_heads": k_cache.shape[1],
        "block_size": k_cache.shape[2],
        "scale": scale,
        "input_layout": "BNSD",
    }
    table = page_table.to(torch.int32)
    if max_query_length == 1:
        rows = q[: len(lengths)].unsqueeze(2)  # [B, Hq, 1, D]
        found = _attend(rows, k_cache, v_cache, table, [1] * len(lengths), lengths, None, shared)
        # A row that writes to the dummy page is padding. The host's lengths can't tell in a captured step.
        live = slots[: len(lengths)] >= k_cache.shape[2]
        out[: len(lengths)] = torch.where(live[:, None, None], found.squeeze(2), 0)
    else:
        mask = _causal_mask(q.device)
        for b, length in enumerate(lengths):
            own = slice(starts[b], starts[b + 1])
            rows = q[own].transpose(0, 1).unsqueeze(0).contiguous()  # [1, Hq, T, D]
            count = starts[b + 1] - starts[b]
            found = _attend(rows, k_cache, v_cache, table[b : b + 1], [count], [length], mask, shared)
            out[own] = found[0].transpose(0, 1)
    out[valid:] = 0


def _attend(
    rows: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    queries: list[int],
    lengths: list[int],
    mask: Tensor | None,
    shared: dict[str, Any],
) -> Tensor:
    found, _ = call(
        "npu_fused_infer_attention_score",
        query=rows,
        key=k_cache,
        value=v_cache,
        atten_mask=mask,
        actual_seq_lengths=queries,
        actual_seq_lengths_kv=lengths,
        block_table=table,
        sparse_mode=_NO_MASK if mask is None else _CAUSAL,
        **shared,
    )
    return found


@cache
def _causal_mask(device: torch.device) -> Tensor:
    """True where a key is hidden, as the function wants it for causal attention."""
    return torch.ones(_CAUSAL_SIZE, _CAUSAL_SIZE, dtype=torch.bool, device=device).triu(1)
