"""Decode attention over a paged KV cache, split along the context ("flash decoding").

Two kernels: partial softmaxes over parts of the context, and their combination. See Dao et al. 2023
(pytorch.org/blog/flash-decoding). Lengths are read from device memory, so a graph holds for all of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from piecework.ops.triton.kernels.common import INTERPRETED

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _product(a, b):
    """The product a b in float32, whatever the dtype."""
    if INTERPRETED:  # whose dot takes bfloat16 for integers
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        return tl.dot(a, b, input_precision="ieee")


@triton.jit(do_not_specialize=["sequences", "window", "table_width"])
def decode_kernel(
    q,
    k,
    v,
    out,
    k_cache,
    v_cache,
    slots,
    page_table,
    lengths,
    partial,
    partial_lse,
    sequences,
    scale,
    window,
    q_tokens,
    q_heads,
    k_tokens,
    k_heads,
    v_tokens,
    v_heads,
    out_tokens,
    table_width,
    cache_pages,
    cache_heads,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (row b, key head h, part s): the GROUP query heads of h over part s of b's context.

    Part 0 takes the newest token's key and value from k and v and writes them to the cache, of which all
    parts read only the older tokens: nothing that this launch reads is written by it. With one part
    (partial None) the result goes to `out`. Rows behind the last sequence, and those of sequences
    without tokens, get zeros.
    """
    b = tl.program_id(0)
    h = tl.program_id(1)
    part = tl.program_id(2)
    parts = tl.num_programs(2)
    length = tl.load(lengths + b, b < sequences, 0).to(tl.int32)
    cached = tl.maximum(length - 1, 0)  # all tokens but the newest
    begin = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    share = tl.cdiv(tl.cdiv(cached - begin, parts), BLOCK_N) * BLOCK_N
    start = begin + part * share
    stop = tl.minimum(start + share, cached)

    channel = tl.arange(0, BLOCK_D)
    there = channel < DIM
    member = tl.arange(0, BLOCK_G)
    head = h * GROUP + member
    mine = (member < GROUP)[:, None] & there[None, :]
    sequence = b.to(tl.int64)
    query = tl.load(q + sequence * q_tokens + head[:, None] * q_heads + channel[None, :], mine, 0.0)
    log2_scale = scale * _LOG2_E

    newest = (part == 0) & (length > 0)
    new_k = tl.load(k + sequence * k_tokens + h * k_heads + channel, there & newest, 0.0)
    new_v = tl.load(v + sequence * v_tokens + h * v_heads + channel, there & newest, 0.0)
    slot = tl.load(slots + b, newest, 0).to(tl.int64)
    place = (slot // PAGE) * cache_pages + h * cache_heads + (slot % PAGE) * DIM + channel
    tl.store(k_cache + place, new_k, there & newest)
    tl.store(v_cache + place, new_v, there & newest)
    score = tl.sum(query.to(tl.float32) * new_k.to(tl.float32)[None, :], 1) * log2_scale
    largest = tl.where(newest, score, float("-inf"))
    weights = tl.where(newest, tl.full((BLOCK_G,), 1.0, tl.float32), 0.0)
    gathered = tl.zeros((BLOCK_G, BLOCK_D), tl.float32) + new_v.to(tl.float32)[None, :]

    for position in range(start, stop, BLOCK_N):
        token = position + tl.arange(0, BLOCK_N)
        seen = token < stop
        page = tl.load(page_table + sequence * table_width + token // PAGE, seen, 0).to(tl.int64)
        line = page * cache_pages + h * cache_heads + (token % PAGE) * DIM
        at = line[:, None] + channel[None, :]
        inside = seen[:, None] & there[None, :]
        keys = tl.load(k_cache + at, inside, 0.0)
        scores = _product(query, tl.trans(keys)) * log2_scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        peak = tl.maximum(largest, tl.max(scores, 1))
        shrink = tl.exp2(largest - peak)
        p = tl.exp2(scores - peak[:, None])
        weights = weights * shrink + tl.sum(p, 1)
        values = tl.load(v_cache + at, inside, 0.0)
        gathered = gathered * shrink[:, None] + _product(p.to(values.dtype), values)
        largest = peak

    total = tl.where(weights > 0, weights, 1.0)
    result = gathered / total[:, None]
    row = sequence * (tl.num_programs(1) * GROUP) + head
    if partial is None:
        target = sequence * out_tokens + head[:, None] * DIM + channel[None, :]
        tl.store(out + target, result.to(out.dtype.element_ty), mine)
    else:
        target = (row * parts + part)[:, None] * DIM + channel[None, :]
        tl.store(partial + target, result, mine)
        lse = tl.where(weights > 0, largest + tl.log2(total), float("-inf"))
        tl.store(partial_lse + row * parts + part, lse, member < GROUP)


@triton.jit
def combine_kernel(
    partial,
    partial_lse,
    out,
    out_tokens,
    PARTS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (row b, query head): the average of the parts' results, weighted by their softmax sums."""
    b = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = b * tl.num_programs(1) + head
    part = tl.arange(0, PARTS)
    channel = tl.arange(0, BLOCK_D)
    there = channel < DIM
    lse = tl.load(partial_lse + row * PARTS + part)
    largest = tl.max(lse, 0)
    share = tl.where(lse > float("-inf"), tl.exp2(lse - largest), 0.0)
    at = (row * PARTS + part)[:, None] * DIM + channel[None, :]
    values = tl.load(partial + at, there[None, :], 0.0)
    total = tl.sum(share, 0)
    found = tl.sum(values * share[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + b * out_tokens + head * DIM + channel, found.to(out.dtype.element_ty), there)
