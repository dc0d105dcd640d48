"""`rms_norm` and its fusions on NPUs. Without a fused function, two follow each other."""

from __future__ import annotations

import torch
from torch import Tensor

from piecework.ops import fused_norm
from piecework.ops.norm import rms_norm as rms_norm_op
from piecework.ops.npu.quantize import HALVES, dynamic_quantize, quantize
from piecework.ops.npu.vendor import available, call


def _supports(x: Tensor, weight: Tensor, *rest: object) -> bool:
    return available() and x.dtype == weight.dtype and x.dtype in (*HALVES, torch.float32) and x.dim() > 1


def _supports_halves(x: Tensor, weight: Tensor, *rest: object) -> bool:
    return x.dtype in HALVES and _supports(x, weight)


def _supports_add(x: Tensor, residual: Tensor, weight: Tensor, *rest: object) -> bool:
    return residual.dtype == x.dtype and _supports(x, weight)


def _supports_add_halves(x: Tensor, residual: Tensor, weight: Tensor, *rest: object) -> bool:
    return x.dtype in HALVES and _supports_add(x, residual, weight)


@rms_norm_op.implement("npu", supports=_supports)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See the reference, here as for the others of this file."""
    y, _ = call("npu_rms_norm", self=x, gamma=weight, epsilon=eps)
    return y


@fused_norm.add_rms_norm.implement("npu", supports=_supports_add)
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """One function."""
    y, _, total = call("npu_add_rms_norm", x1=x, x2=residual, gamma=weight, epsilon=eps)
    return y, total


@fused_norm.rms_norm_quant.implement("npu", supports=_supports)
def rms_norm_quant(
    x: Tensor, weight: Tensor, eps: float, scale: Tensor, reciprocal: Tensor, offset: Tensor | None = None
) -> Tensor:
    """Two functions: npu_rms_norm_quant insists on a bias and an offset."""
    y: Tensor = quantize(rms_norm(x, weight, eps), scale, reciprocal, offset)
    return y


@fused_norm.rms_norm_dynamic_quant.implement("npu", supports=_supports_halves)
def rms_norm_dynamic_quant(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Two functions."""
    y, scale = dynamic_quantize(rms_norm(x, weight, eps))
    return y, scale


@fused_norm.add_rms_norm_quant.implement("npu", supports=_supports_add_halves)
def add_rms_norm_quant(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    scale: Tensor,
    reciprocal: Tensor,
    offset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One function, which wants a scale and a whole offset for each channel."""
    y, _, total = call(
        "npu_add_rms_norm_quant",
        x1=x,
        x2=residual,
        gamma=weight,
        scales1=scale.expand(weight.shape),
        zero_points1=None if offset is None else offset.round().to(torch.int32).expand(weight.shape),
        epsilon=eps,
    )
    return y, total


@fused_norm.add_rms_norm_dynamic_quant.implement("npu", supports=_supports_add_halves)
def add_rms_norm_dynamic_quant(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """One function."""
    y, _, total, scale, _ = call(
        "npu_add_rms_norm_dynamic_quant", x1=x, x2=residual, gamma=weight, epsilon=eps
    )
    return y, total, scale.unsqueeze(-1)
