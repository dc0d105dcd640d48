"""Norms fused with what stands around them: the residual's addition before, quantisation behind.

Each means the ops in its name one after the other, with a rounding to x's dtype wherever these round.
"""

from __future__ import annotations

import torch
from torch import Tensor

from piecework.ops.norm import rms_norm
from piecework.ops.quantize import dynamic_quantize, quantize
from piecework.ops.registry import define


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, residual [..., H], weight [H] -> (rms_norm(x + residual), x + residual)."""
    total = x + residual
    return rms_norm.reference(total, weight, eps), total


def _add_rms_norm_fake(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _rms_norm_quant(
    x: Tensor, weight: Tensor, eps: float, scale: Tensor, reciprocal: Tensor, offset: Tensor | None = None
) -> Tensor:
    """quantize(rms_norm(x)): x [..., H] -> int8 [..., H]."""
    y: Tensor = quantize.reference(rms_norm.reference(x, weight, eps), scale, reciprocal, offset)
    return y


def _rms_norm_quant_fake(
    x: Tensor, weight: Tensor, eps: float, scale: Tensor, reciprocal: Tensor, offset: Tensor | None = None
) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.int8)


def _rms_norm_dynamic_quant(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """dynamic_quantize(rms_norm(x)): x [..., H] -> (int8 [..., H], scale [..., 1] float32)."""
    y, scale = dynamic_quantize.reference(rms_norm.reference(x, weight, eps))
    return y, scale


def _rms_norm_dynamic_quant_fake(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def _add_rms_norm_quant(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    scale: Tensor,
    reciprocal: Tensor,
    offset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x, residual [..., H] -> (quantize(rms_norm(x + residual)) int8, x + residual)."""
    total = x + residual
    return _rms_norm_quant(total, weight, eps, scale, reciprocal, offset), total


def _add_rms_norm_quant_fake(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    scale: Tensor,
    reciprocal: Tensor,
    offset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty(x.shape)


def _add_rms_norm_dynamic_quant(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x, residual [..., H] -> (int8 [..., H], x + residual, scale [..., 1] float32)."""
    total = x + residual
    y, scale = _rms_norm_dynamic_quant(total, weight, eps)
    return y, total, scale


def _add_rms_norm_dynamic_quant_fake(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    y, scale = _rms_norm_dynamic_quant_fake(x, weight, eps)
    return y, x.new_empty(x.shape), scale


_STATIC = "Tensor scale, Tensor reciprocal, Tensor? offset=None"
_ADD = "Tensor x, Tensor residual, Tensor weight, float eps"

add_rms_norm = define(f"add_rms_norm({_ADD}) -> (Tensor, Tensor)", _add_rms_norm, _add_rms_norm_fake)
rms_norm_quant = define(
    f"rms_norm_quant(Tensor x, Tensor weight, float eps, {_STATIC}) -> Tensor",
    _rms_norm_quant,
    _rms_norm_quant_fake,
)
rms_norm_dynamic_quant = define(
    "rms_norm_dynamic_quant(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    _rms_norm_dynamic_quant,
    _rms_norm_dynamic_quant_fake,
)
add_rms_norm_quant = define(
    f"add_rms_norm_quant({_ADD}, {_STATIC}) -> (Tensor, Tensor)",
    _add_rms_norm_quant,
    _add_rms_norm_quant_fake,
)
add_rms_norm_dynamic_quant = define(
    f"add_rms_norm_dynamic_quant({_ADD}) -> (Tensor, Tensor, Tensor)",
    _add_rms_norm_dynamic_quant,
    _add_rms_norm_dynamic_quant_fake,
)
