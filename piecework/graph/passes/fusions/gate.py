"""The SwiGLU gate with the quantisation behind it as one op.

Not bitwise by declaration: a kernel's exponential may differ from torch's in the last place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from piecework.graph.passes.base import AT_LEAST_ONE, Match
from piecework.graph.passes.fusions.norm import DYNAMIC, STATIC, constants_fit
from piecework.graph.passes.rewrite import PatternPass

_ops = torch.ops.piecework


def silu_mul_quant() -> PatternPass:
    """silu_and_mul, quantize -> `silu_mul_quant`, where nobody else takes the gate's result."""

    def pattern(x: Tensor, scale: Tensor, reciprocal: Tensor) -> Any:
        return _ops.quantize(_ops.silu_and_mul(x), scale, reciprocal)

    def with_offset(x: Tensor, scale: Tensor, reciprocal: Tensor, offset: Tensor) -> Any:
        return _ops.quantize(_ops.silu_and_mul(x), scale, reciprocal, offset)

    def replacement(x: Tensor, scale: Tensor, reciprocal: Tensor, offset: Tensor | None = None) -> Any:
        return _ops.silu_mul_quant(x, scale, reciprocal, offset)

    return PatternPass(
        name="silu_mul_quant",
        pattern=(pattern, with_offset),
        replacement=replacement,
        where=lambda match: _even(match) and constants_fit(match),
        bound=STATIC,
        expect=AT_LEAST_ONE,
    )


def silu_mul_dynamic_quant() -> PatternPass:
    """silu_and_mul, dynamic_quantize -> `silu_mul_dynamic_quant`, likewise."""

    def pattern(x: Tensor) -> Any:
        y, scale = _ops.dynamic_quantize(_ops.silu_and_mul(x))
        return y, scale

    def replacement(x: Tensor) -> Any:
        return _ops.silu_mul_dynamic_quant(x)

    return PatternPass(
        name="silu_mul_dynamic_quant",
        pattern=pattern,
        replacement=replacement,
        where=_even,
        bound=DYNAMIC,
        expect=AT_LEAST_ONE,
    )


def _even(match: Match) -> bool:
    """Gate and up are halves of one floating-point tensor."""
    x = match.value("x")
    return bool(x.dtype.is_floating_point and x.shape[-1] % 2 == 0)
