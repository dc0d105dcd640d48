"""rotary, split_qkv_rope and split_qkv_rmsnorm_rope, each as one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from piecework.ops import fused_qkv
from piecework.ops.rotary import rotary
from piecework.ops.triton.available import FLOATS, usable, usable_float
from piecework.ops.triton.rows import power_of_two

_TILE = 1024
_MOST_HEADS = 8


def _launch(
    q: Tensor,
    k: Tensor,
    outs: fused_qkv.QK,
    positions: Tensor,
    cos_sin: Tensor,
    strides: tuple[int, int, int, int],
    k_start: int,
    interleaved: bool,
    norm: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None] = (None, None, None, None),
    eps: float = 0.0,
) -> None:
    from piecework.ops.triton.kernels.common import warps_for
    from piecework.ops.triton.kernels.heads import heads_kernel

    q_out, k_out = outs
    tokens, num_q, dim = q_out.shape
    num_kv = k_out.shape[1]
    if tokens == 0:
        return
    half = cos_sin.shape[1] // 2
    rest = dim - 2 * half
    width = power_of_two(dim)
    heads_q, heads_kv = (min(_MOST_HEADS, power_of_two(n), max(1, _TILE // width)) for n in (num_q, num_kv))
    heads_kernel[(tokens, -(-num_q // heads_q) + -(-num_kv // heads_kv))](
        q,
        k,
        q_out,
        k_out,
        positions,
        cos_sin,
        *norm,
        eps,
        *strides,
        K_START=k_start,
        NUM_Q=num_q,
        NUM_KV=num_kv,
        DIM=dim,
        HALF=half,
        REST=rest,
        HEADS_Q=heads_q,
        HEADS_KV=heads_kv,
        BLOCK_HALF=power_of_two(half),
        BLOCK_REST=power_of_two(max(1, rest)),
        INTERLEAVED=interleaved,
        num_warps=warps_for(heads_q * width),
    )


def _fits(positions: Tensor, cos_sin: Tensor, dim: int) -> bool:
    return (
        positions.dtype in (torch.int64, torch.int32)
        and positions.is_contiguous()
        and cos_sin.dtype == torch.float32
        and cos_sin.is_contiguous()
        and 2 <= cos_sin.shape[1] <= dim
        and usable(positions)
    )


def _supports_rotary(
    positions: Tensor, q: Tensor, k: Tensor, cos_sin: Tensor, interleaved: bool = False
) -> bool:
    return q.dim() == 3 and usable_float(q, k) and _fits(positions, cos_sin, q.shape[2])


def _heads(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


@rotary.implement("triton", supports=_supports_rotary)
def rotary_triton(
    positions: Tensor, q: Tensor, k: Tensor, cos_sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Run rotary; see the reference."""
    q, k = _heads(q), _heads(k)
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=q.dtype, device=q.device)
    strides = (q.stride(0), q.stride(1), k.stride(0), k.stride(1))
    _launch(q, k, (q_out, k_out), positions, cos_sin, strides, 0, interleaved)
    return q_out, k_out


def _split(
    qkv: Tensor, num_heads: int, num_kv_heads: int
) -> tuple[fused_qkv.QK, tuple[int, int, int, int], int]:
    """Make the results, and give the strides of queries and keys in qkv, and where keys start."""
    tokens, width = qkv.shape
    dim = width // (num_heads + 2 * num_kv_heads)
    q, k = (
        torch.empty((tokens, n, dim), dtype=qkv.dtype, device=qkv.device) for n in (num_heads, num_kv_heads)
    )
    row = qkv.stride(0)
    return (q, k), (row, dim, row, dim), num_heads * dim


def _supports_split(
    qkv: Tensor, positions: Tensor, cos_sin: Tensor, num_heads: int, num_kv_heads: int, *rest: object
) -> bool:
    dim = qkv.shape[-1] // (num_heads + 2 * num_kv_heads)
    return qkv.dim() == 2 and usable_float(qkv) and _fits(positions, cos_sin, dim)


@fused_qkv.split_qkv_rope.implement("triton", supports=_supports_split)
def split_qkv_rope_triton(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    interleaved: bool = False,
) -> fused_qkv.QK:
    """Run split_qkv_rope; see the reference."""
    qkv = qkv if qkv.stride(1) == 1 else qkv.contiguous()
    outs, strides, k_start = _split(qkv, num_heads, num_kv_heads)
    _launch(qkv, qkv, outs, positions, cos_sin, strides, k_start, interleaved)
    return outs


def _supports_norm(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    interleaved: bool = False,
) -> bool:
    small = [t for t in (q_weight, k_weight, q_bias, k_bias) if t is not None]
    return (
        qkv.dtype in FLOATS
        and all(t.dtype == qkv.dtype and t.is_contiguous() for t in small)
        and _supports_split(qkv, positions, cos_sin, num_heads, num_kv_heads)
    )


@fused_qkv.split_qkv_rmsnorm_rope.implement("triton", supports=_supports_norm)
def split_qkv_rmsnorm_rope_triton(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    interleaved: bool = False,
) -> fused_qkv.QK:
    """Run split_qkv_rmsnorm_rope; see the reference."""
    qkv = qkv if qkv.stride(1) == 1 else qkv.contiguous()
    outs, strides, k_start = _split(qkv, num_heads, num_kv_heads)
    norm = (q_weight, k_weight, q_bias, k_bias)
    _launch(qkv, qkv, outs, positions, cos_sin, strides, k_start, interleaved, norm, eps)
    return outs
