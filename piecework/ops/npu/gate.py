"""`silu_and_mul` and its fusions on NPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from piecework.ops import fused_gate
from piecework.ops.activation import silu_and_mul as silu_and_mul_op
from piecework.ops.npu.quantize import HALVES, dynamic_quantize, quantize
from piecework.ops.npu.vendor import available, call


def _supports(x: Tensor, *rest: object) -> bool:
    return available() and x.dtype in (*HALVES, torch.float32)


def _supports_dynamic(x: Tensor) -> bool:
    return available() and x.dtype in HALVES and x.dim() > 1


@silu_and_mul_op.implement("npu", supports=_supports)
def silu_and_mul(x: Tensor) -> Tensor:
    """The first half is the gate, as in the reference."""
    (y,) = call("npu_swiglu", self=x, dim=-1)
    return y


@fused_gate.silu_mul_quant.implement("npu", supports=_supports)
def silu_mul_quant(x: Tensor, scale: Tensor, reciprocal: Tensor, offset: Tensor | None = None) -> Tensor:
    """Two functions."""
    y: Tensor = quantize(silu_and_mul(x), scale, reciprocal, offset)
    return y


@fused_gate.silu_mul_dynamic_quant.implement("npu", supports=_supports_dynamic)
def silu_mul_dynamic_quant(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two functions."""
    y, scale = dynamic_quantize(silu_and_mul(x))
    return y, scale
