"""`rotary`, `split_qkv_rope` and `split_qkv_rmsnorm_rope` on NPUs.

torch_npu has no fused split_qkv_rmsnorm_rope: with triton-ascend it is the Triton kernel, else norms and
rotary.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor

from piecework.ops import fused_qkv
from piecework.ops.npu.norm import rms_norm
from piecework.ops.npu.quantize import HALVES
from piecework.ops.npu.vendor import ascend_triton, available, call
from piecework.ops.rotary import rotary as rotary_op

log = logging.getLogger("piecework.ops.npu")
# What npu_rotary_mul takes: heads and channels are below these.
_MOST_HEADS, _MOST_CHANNELS = 1000, 896


def _fits(x: Tensor, heads: int, dim: int, cos_sin: Tensor) -> bool:
    usable = available() and x.dtype in (*HALVES, torch.float32)
    return usable and heads < _MOST_HEADS and dim < _MOST_CHANNELS and 2 <= cos_sin.shape[1] <= dim


def _supports_rotary(
    positions: Tensor, q: Tensor, k: Tensor, cos_sin: Tensor, interleaved: bool = False
) -> bool:
    return q.dim() == 3 and k.dtype == q.dtype and _fits(q, q.shape[1], q.shape[2], cos_sin)


def _supports_split(
    qkv: Tensor, positions: Tensor, cos_sin: Tensor, num_heads: int, num_kv_heads: int, *rest: object
) -> bool:
    dim = qkv.shape[-1] // (num_heads + 2 * num_kv_heads)
    return qkv.dim() == 2 and qkv.is_contiguous() and _fits(qkv, num_heads, dim, cos_sin)


def _supports_norm(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
    *rest: object,
) -> bool:
    same = q_weight.dtype == k_weight.dtype == qkv.dtype
    return same and _supports_split(qkv, positions, cos_sin, num_heads, num_kv_heads)


def _angles(positions: Tensor, cos_sin: Tensor, dtype: torch.dtype, interleaved: bool) -> list[Tensor]:
    """Cosines and sines of each channel, [1, T, 1, R] in `dtype`."""
    halves = cos_sin[positions].to(dtype).chunk(2, -1)
    full = [half.repeat_interleave(2, -1) if interleaved else torch.cat((half, half), -1) for half in halves]
    return [part[None, :, None] for part in full]


def _turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Turn x [T, H, D]; channels behind those of cos pass through."""
    size = cos.shape[-1]
    (turned,) = call(
        "npu_rotary_mul",
        self=x[None, ..., :size],
        r1=cos,
        r2=sin,
        rotary_mode="interleave" if interleaved else "half",
    )
    return turned[0] if size == x.shape[-1] else torch.cat((turned[0], x[..., size:]), -1)


@rotary_op.implement("npu", supports=_supports_rotary)
def rotary(
    positions: Tensor, q: Tensor, k: Tensor, cos_sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """See the reference. Cosines and sines are rounded to q's dtype, which the function asks for."""
    cos, sin = _angles(positions, cos_sin, q.dtype, interleaved)
    return _turn(q, cos, sin, interleaved), _turn(k, cos, sin, interleaved)


@fused_qkv.split_qkv_rope.implement("npu", supports=_supports_split)
def split_qkv_rope(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    interleaved: bool = False,
) -> fused_qkv.QK:
    """Views, and rotary of queries and of keys."""
    q, k = fused_qkv.split_heads(qkv, num_heads, num_kv_heads)
    q, k = rotary(positions, q, k, cos_sin, interleaved)
    return q, k


@fused_qkv.split_qkv_rmsnorm_rope.implement("npu", supports=_supports_norm)
def split_qkv_rmsnorm_rope(
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
    """The Triton kernel where there is triton-ascend, else two norms and rotary."""
    _tell_once(ascend_triton())
    if ascend_triton():
        run = fused_qkv.split_qkv_rmsnorm_rope.implementations["triton"].run
        found: fused_qkv.QK = run(
            qkv,
            positions,
            cos_sin,
            q_weight,
            k_weight,
            eps,
            num_heads,
            num_kv_heads,
            q_bias,
            k_bias,
            interleaved,
        )
        return found
    q, k = fused_qkv.split_heads(qkv, num_heads, num_kv_heads)
    q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    q = q if q_bias is None else q + q_bias
    k = k if k_bias is None else k + k_bias
    q, k = rotary(positions, q, k, cos_sin, interleaved)
    return q, k


@cache
def _tell_once(triton: bool) -> None:
    if triton:
        log.info("split_qkv_rmsnorm_rope runs as a Triton kernel (triton-ascend)")
    else:
        log.warning(
            "split_qkv_rmsnorm_rope runs as two norms and rotary: torch_npu has no such function, and "
            "triton-ascend is not installed"
        )
