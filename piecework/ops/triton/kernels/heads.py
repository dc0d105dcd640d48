"""One kernel from the packed projection to queries and keys: cut, per-head norms, rotation."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load(source, offset, inside):
    return tl.load(source + offset, inside, 0.0).to(tl.float32)


@triton.jit
def _scaled(value, inverse, weight, bias, channel, inside, dtype: tl.constexpr):
    """The second half of rms_norm, with a rounding after each step, and the bias."""
    normed = (value * inverse[:, None]).to(dtype).to(tl.float32) * _load(weight, channel, inside)
    normed = normed.to(dtype).to(tl.float32)
    if bias is not None:
        normed = (normed + _load(bias, channel, inside)).to(dtype).to(tl.float32)
    return normed


@triton.jit
def _turn(
    source,
    target,
    weight,
    bias,
    eps,
    cosines,
    first_head,
    source_heads,
    COUNT: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Norm (where there is a weight) and rotation of HEADS heads of one token.

    A head is read as three tiles: both members of the pairs that turn, and the REST that does not.
    """
    dtype: tl.constexpr = source.dtype.element_ty
    head = first_head + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    there = pair < HALF
    inside = (head < COUNT) & there
    if INTERLEAVED:
        first = 2 * pair
        second = 2 * pair + 1
    else:
        first = pair
        second = pair + HALF
    cos = _load(cosines, pair, there)
    sin = _load(cosines, HALF + pair, there)
    a = _load(source, head * source_heads + first, inside)
    b = _load(source, head * source_heads + second, inside)
    if REST > 0:
        behind = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        left = behind < DIM
        rest = _load(source, head * source_heads + behind, (head < COUNT) & left)
    if weight is not None:
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        if REST > 0:
            squares += tl.sum(rest * rest, 1)
        inverse = tl.rsqrt(squares / DIM + eps)
        a = _scaled(a, inverse, weight, bias, first, there, dtype)
        b = _scaled(b, inverse, weight, bias, second, there, dtype)
        if REST > 0:
            rest = _scaled(rest, inverse, weight, bias, behind, left, dtype)
    tl.store(target + head * DIM + first, (a * cos - b * sin).to(dtype), inside)
    tl.store(target + head * DIM + second, (b * cos + a * sin).to(dtype), inside)
    if REST > 0:
        tl.store(target + head * DIM + behind, rest.to(dtype), (head < COUNT) & left)


@triton.jit
def heads_kernel(
    q,
    k,
    q_out,
    k_out,
    positions,
    table,
    q_weight,
    k_weight,
    q_bias,
    k_bias,
    eps,
    q_tokens,
    q_heads,
    k_tokens,
    k_heads,
    K_START: tl.constexpr,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    HEADS_Q: tl.constexpr,
    HEADS_KV: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Program (token, i): the blocks of query heads come first, then those of keys.

    `q_tokens` and `q_heads` are strides. With a packed projection q and k are the same tensor, in which
    keys begin K_START behind the queries. `table` has rows of 2 * HALF: cosines, then sines.
    """
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    q_blocks: tl.constexpr = (NUM_Q + HEADS_Q - 1) // HEADS_Q
    cosines = table + tl.load(positions + token).to(tl.int64) * (2 * HALF)
    if block < q_blocks:
        _turn(
            q + token * q_tokens,
            q_out + token * (NUM_Q * DIM),
            q_weight,
            q_bias,
            eps,
            cosines,
            block * HEADS_Q,
            q_heads,
            NUM_Q,
            DIM,
            HALF,
            REST,
            HEADS_Q,
            BLOCK_HALF,
            BLOCK_REST,
            INTERLEAVED,
        )
    else:
        _turn(
            k + token * k_tokens + K_START,
            k_out + token * (NUM_KV * DIM),
            k_weight,
            k_bias,
            eps,
            cosines,
            (block - q_blocks) * HEADS_KV,
            k_heads,
            NUM_KV,
            DIM,
            HALF,
            REST,
            HEADS_KV,
            BLOCK_HALF,
            BLOCK_REST,
            INTERLEAVED,
        )
