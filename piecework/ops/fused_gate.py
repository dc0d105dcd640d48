"""The SwiGLU gate fused with the quantisation behind it."""

from __future__ import annotations

import torch
from torch import Tensor

from piecework.ops.activation import silu_and_mul
from piecework.ops.quantize import dynamic_quantize, quantize
from piecework.ops.registry import define


def _silu_mul_quant(x: Tensor, scale: Tensor, reciprocal: Tensor, offset: Tensor | None = None) -> Tensor:
    """quantize(silu_and_mul(x)): x [..., 2I] -> int8 [..., I]."""
    y: Tensor = quantize.reference(silu_and_mul.reference(x), scale, reciprocal, offset)
    return y


def _silu_mul_quant_fake(
    x: Tensor, scale: Tensor, reciprocal: Tensor, offset: Tensor | None = None
) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.int8)


def _silu_mul_dynamic_quant(x: Tensor) -> tuple[Tensor, Tensor]:
    """dynamic_quantize(silu_and_mul(x)): x [..., 2I] -> (int8 [..., I], scale [..., 1] float32)."""
    y, scale = dynamic_quantize.reference(silu_and_mul.reference(x))
    return y, scale


def _silu_mul_dynamic_quant_fake(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.new_empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.int8)
    return y, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


silu_mul_quant = define(
    "silu_mul_quant(Tensor x, Tensor scale, Tensor reciprocal, Tensor? offset=None) -> Tensor",
    _silu_mul_quant,
    _silu_mul_quant_fake,
)
silu_mul_dynamic_quant = define(
    "silu_mul_dynamic_quant(Tensor x) -> (Tensor, Tensor)",
    _silu_mul_dynamic_quant,
    _silu_mul_dynamic_quant_fake,
)
