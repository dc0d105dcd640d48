"""`rotary`, `split_qkv_rope` and `split_qkv_rmsnorm_rope` on the CPU, by the library's kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from piecework.native.types import TYPES
from piecework.ops import fused_qkv
from piecework.ops.cpu.kernels import Kernel, address, contiguous, heads_strided, row_strided
from piecework.ops.rotary import rotary

_rotary = Kernel(
    "rotary",
    "positions q k cos_sin q_out k_out",
    "tokens heads kv_heads size half q_row q_step k_row k_step interleaved type",
)
_split_qkv_rope = Kernel(
    "split_qkv_rope",
    "qkv positions cos_sin q k q_weight k_weight q_bias k_bias",
    "tokens heads kv_heads size half row interleaved type",
    "eps",
)


def _supports_table(positions: Tensor, cos_sin: Tensor) -> bool:
    return (
        positions.dtype == torch.int64
        and cos_sin.dtype == torch.float32
        and positions.dim() == 1
        and cos_sin.dim() == 2
        and contiguous(positions, cos_sin)
    )


def _supports_rotary(
    positions: Tensor, q: Tensor, k: Tensor, cos_sin: Tensor, interleaved: bool = False
) -> bool:
    return (
        q.dtype == k.dtype and heads_strided(q) and heads_strided(k) and _supports_table(positions, cos_sin)
    )


@rotary.implement("cpu", supports=_supports_rotary, inline=True)
def rotary_cpu(
    positions: Tensor, q: Tensor, k: Tensor, cos_sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """See the reference, here as for the others of this file; q and k may be cut from longer rows."""
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    tokens, heads, size = q.shape
    q_row, q_step, _ = q.stride()
    k_row, k_step, _ = k.stride()
    _rotary(
        positions.data_ptr(),
        q.data_ptr(),
        k.data_ptr(),
        cos_sin.data_ptr(),
        q_out.data_ptr(),
        k_out.data_ptr(),
        tokens,
        heads,
        k.shape[1],
        size,
        cos_sin.shape[1] // 2,
        q_row,
        q_step,
        k_row,
        k_step,
        interleaved,
        TYPES[q.dtype],
    )
    return q_out, k_out


def _supports_rope(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    interleaved: bool = False,
) -> bool:
    return qkv.dim() == 2 and row_strided(qkv) and _supports_table(positions, cos_sin)


@fused_qkv.split_qkv_rope.implement("cpu", supports=_supports_rope, inline=True)
def split_qkv_rope_cpu(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    interleaved: bool = False,
) -> fused_qkv.QK:
    """One pass over each token's row."""
    return _split_rope(qkv, positions, cos_sin, num_heads, num_kv_heads, interleaved, 0, 0, 0, 0, 0.0)


def _supports_norm_rope(
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
    weights = (q_weight, k_weight, q_bias, k_bias)
    same = all(w is None or w.dtype == qkv.dtype for w in weights)
    return same and contiguous(*weights) and _supports_rope(qkv, positions, cos_sin, num_heads, num_kv_heads)


@fused_qkv.split_qkv_rmsnorm_rope.implement("cpu", supports=_supports_norm_rope, inline=True)
def split_qkv_rmsnorm_rope_cpu(
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
    """A head stays in the core's cache between its norm and its rotation."""
    weights = (q_weight.data_ptr(), k_weight.data_ptr(), address(q_bias), address(k_bias))
    return _split_rope(qkv, positions, cos_sin, num_heads, num_kv_heads, interleaved, *weights, eps)


def _split_rope(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    heads: int,
    kv_heads: int,
    interleaved: bool,
    q_weight: int,
    k_weight: int,
    q_bias: int,
    k_bias: int,
    eps: float,
) -> fused_qkv.QK:
    tokens, width = qkv.shape
    size = width // (heads + 2 * kv_heads)
    q = qkv.new_empty((tokens, heads, size))
    k = qkv.new_empty((tokens, kv_heads, size))
    _split_qkv_rope(
        qkv.data_ptr(),
        positions.data_ptr(),
        cos_sin.data_ptr(),
        q.data_ptr(),
        k.data_ptr(),
        q_weight,
        k_weight,
        q_bias,
        k_bias,
        tokens,
        heads,
        kv_heads,
        size,
        cos_sin.shape[1] // 2,
        qkv.stride(0),
        interleaved,
        TYPES[qkv.dtype],
        eps,
    )
    return q, k
