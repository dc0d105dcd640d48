"""rms_norm with the addition before it and the quantisation behind it as one op.

None is bitwise by declaration: with the ops' references the bits are the same, but a kernel may sum a
row in another order than the norm's own kernel does, and then a result can round to its neighbour.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from piecework.graph.passes.base import AT_LEAST_ONE, Match
from piecework.graph.passes.bounds import tolerance
from piecework.graph.passes.rewrite import PatternPass

_ops = torch.ops.piecework

NORM = tolerance()
STATIC = tolerance(integer=1, integers_off=0.05)
"""A value on the border between two steps may go to either; few are there."""
DYNAMIC = tolerance(float32=1e-2, integer=1, integers_off=0.05)
"""Where the row's largest value rounds to its bfloat16 neighbour, the scale moves by 2^-7."""


def _norm_fits(match: Match, x: str) -> bool:
    """Gamma is [H] and has x's dtype, so that the op's results have it too."""
    weight, rows = match.value("weight"), match.value(x)
    return match.same_dtype(x, "weight") and tuple(weight.shape) == (rows.shape[-1],)


def _alone_fits(match: Match) -> bool:
    return _norm_fits(match, "x")


def _sum_fits(match: Match) -> bool:
    """x and the residual are of one kind: nothing is broadcast or promoted by their sum."""
    return match.same_shape("x", "residual") and match.same_dtype("x", "residual") and _norm_fits(match, "x")


def constants_fit(match: Match) -> bool:
    """Scale, reciprocal and offset are one float32 number each, as the ops take them."""
    names = [name for name in ("scale", "reciprocal", "offset") if name in match.bound]
    values = [match.value(name) for name in names]
    return all(tuple(v.shape) == (1,) and v.dtype == torch.float32 for v in values)


def add_rms_norm() -> PatternPass:
    """residual + x, rms_norm -> `add_rms_norm`, which gives the sum as well: it may have other users."""

    def pattern(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Any:
        total = residual + x
        return _ops.rms_norm(total, weight, eps), total

    def replacement(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Any:
        return _ops.add_rms_norm(x, residual, weight, eps)

    return PatternPass(
        name="add_rms_norm",
        pattern=pattern,
        replacement=replacement,
        where=_sum_fits,
        bound=NORM,
        expect=AT_LEAST_ONE,
    )


def rms_norm_quant() -> PatternPass:
    """rms_norm, quantize -> `rms_norm_quant`, where nobody else takes the norm's result."""

    def pattern(x: Tensor, weight: Tensor, eps: float, scale: Tensor, reciprocal: Tensor) -> Any:
        return _ops.quantize(_ops.rms_norm(x, weight, eps), scale, reciprocal)

    def with_offset(
        x: Tensor, weight: Tensor, eps: float, scale: Tensor, reciprocal: Tensor, offset: Tensor
    ) -> Any:
        return _ops.quantize(_ops.rms_norm(x, weight, eps), scale, reciprocal, offset)

    def replacement(
        x: Tensor, weight: Tensor, eps: float, scale: Tensor, reciprocal: Tensor, offset: Tensor | None = None
    ) -> Any:
        return _ops.rms_norm_quant(x, weight, eps, scale, reciprocal, offset)

    return PatternPass(
        name="rms_norm_quant",
        pattern=(pattern, with_offset),
        replacement=replacement,
        where=lambda match: _alone_fits(match) and constants_fit(match),
        bound=STATIC,
        expect=AT_LEAST_ONE,
    )


def rms_norm_dynamic_quant() -> PatternPass:
    """rms_norm, dynamic_quantize -> `rms_norm_dynamic_quant`, where nobody else takes the norm's result."""

    def pattern(x: Tensor, weight: Tensor, eps: float) -> Any:
        y, scale = _ops.dynamic_quantize(_ops.rms_norm(x, weight, eps))
        return y, scale

    def replacement(x: Tensor, weight: Tensor, eps: float) -> Any:
        return _ops.rms_norm_dynamic_quant(x, weight, eps)

    return PatternPass(
        name="rms_norm_dynamic_quant",
        pattern=pattern,
        replacement=replacement,
        where=_alone_fits,
        bound=DYNAMIC,
        expect=AT_LEAST_ONE,
    )


def add_rms_norm_quant() -> PatternPass:
    """residual + x, rms_norm, quantize -> `add_rms_norm_quant`, which gives the sum as well."""

    def pattern(
        x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: Tensor, reciprocal: Tensor
    ) -> Any:
        total = residual + x
        return _ops.quantize(_ops.rms_norm(total, weight, eps), scale, reciprocal), total

    def with_offset(
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        scale: Tensor,
        reciprocal: Tensor,
        offset: Tensor,
    ) -> Any:
        total = residual + x
        return _ops.quantize(_ops.rms_norm(total, weight, eps), scale, reciprocal, offset), total

    def replacement(
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        scale: Tensor,
        reciprocal: Tensor,
        offset: Tensor | None = None,
    ) -> Any:
        return _ops.add_rms_norm_quant(x, residual, weight, eps, scale, reciprocal, offset)

    return PatternPass(
        name="add_rms_norm_quant",
        pattern=(pattern, with_offset),
        replacement=replacement,
        where=lambda match: _sum_fits(match) and constants_fit(match),
        bound=STATIC,
        expect=AT_LEAST_ONE,
    )


def add_rms_norm_dynamic_quant() -> PatternPass:
    """residual + x, rms_norm, dynamic_quantize -> `add_rms_norm_dynamic_quant`, with the sum as well."""

    def pattern(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Any:
        total = residual + x
        y, scale = _ops.dynamic_quantize(_ops.rms_norm(total, weight, eps))
        return y, total, scale

    def replacement(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Any:
        return _ops.add_rms_norm_dynamic_quant(x, residual, weight, eps)

    return PatternPass(
        name="add_rms_norm_dynamic_quant",
        pattern=pattern,
        replacement=replacement,
        where=_sum_fits,
        bound=DYNAMIC,
        expect=AT_LEAST_ONE,
    )
