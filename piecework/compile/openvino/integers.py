"""Converters of the named ops that quantise, and of products with int8 weights."""

from __future__ import annotations

from typing import Any

import openvino as ov
import torch
from openvino import opset15 as opset

from piecework.compile.openvino.convert import converter
from piecework.compile.openvino.floats import rms_norm, silu_and_mul
from piecework.compile.openvino.parts import add, cast, ints, is_constant, multiply, scalar, unsqueeze, wide
from piecework.compile.openvino.tensors import TYPES
from piecework.ops.quantize import INT8_MAX


def _to_int8(x: Any) -> Any:
    rounded = opset.round(x, "half_to_even")
    return cast(opset.clamp(rounded, -128.0, 127.0).output(0), ov.Type.i8)


@converter("piecework::quantize")
def quantize(x: Any, scale: Any, reciprocal: Any, offset: Any = None) -> Any:
    """Divides by the scale, as the reference does."""
    y = opset.divide(wide(x), scale).output(0)
    return _to_int8(y if offset is None else add(y, offset))


@converter("piecework::dynamic_quantize")
def dynamic_quantize(x: Any) -> tuple[Any, Any]:
    """One scale per row. OpenVINO's maximum passes over NaN, so a row that has one is looked for."""
    w = wide(x)
    largest = opset.reduce_max(opset.abs(w), ints([-1]), True).output(0)
    bad = opset.reduce_logical_or(opset.is_nan(w), ints([-1]), True)
    scale = opset.divide(largest, scalar(INT8_MAX, largest)).output(0)
    scale = opset.select(bad, scalar(float("nan"), scale), scale).output(0)
    zero = scalar(0.0, w)
    y = opset.select(opset.greater(scale, zero), opset.divide(w, scale), zero).output(0)
    y = opset.select(opset.is_nan(y), zero, y).output(0)
    return _to_int8(y), scale


def _product(x: Any, weight: Any, scale: Any, quant_bias: Any = None) -> Any:
    """(x weight^T + quant_bias) * scale in float32, in which sums of up to 1,024 products of int8 are exact.

    A weight that the model holds is scaled before the product: the plug-ins know that form and keep the
    weight in int8. One that comes from outside would be scaled anew at each run.
    """
    w = wide(weight)
    if is_constant(weight):
        y = opset.matmul(wide(x), multiply(w, unsqueeze(scale, 1)), False, True).output(0)
        return y if quant_bias is None else add(y, multiply(wide(quant_bias), scale))
    y = opset.matmul(wide(x), w, False, True).output(0)
    return multiply(y if quant_bias is None else add(y, wide(quant_bias)), scale)


@converter("piecework::linear_w8a8")
def linear_w8a8(
    x: Any, weight: Any, scale: Any, x_scale: Any, quant_bias: Any, bias: Any, dtype: torch.dtype
) -> Any:
    """See the reference for the arguments."""
    y = _product(x, weight, scale, quant_bias)
    y = y if x_scale is None else multiply(y, x_scale)
    y = y if bias is None else add(y, wide(bias))
    return cast(y, TYPES[dtype])


@converter("piecework::linear_w8")
def linear_w8(x: Any, weight: Any, scale: Any, bias: Any = None) -> Any:
    """Activations stay floats."""
    y = _product(x, weight, scale)
    return cast(y if bias is None else add(y, wide(bias)), x.get_element_type())


@converter("piecework::embedding_int8")
def embedding_int8(ids: Any, weight: Any, scale: Any, dtype: torch.dtype) -> Any:
    """Rows of the table and their scales."""
    axis = opset.constant(0, ov.Type.i64)
    rows, by = (opset.gather(table, ids, axis).output(0) for table in (weight, scale))
    return cast(multiply(wide(rows), unsqueeze(by, 1)), TYPES[dtype])


@converter("piecework::rms_norm_quant")
def rms_norm_quant(x: Any, weight: Any, eps: float, *quantiser: Any) -> Any:
    """A norm and what stands behind it, here as below."""
    return quantize(rms_norm(x, weight, eps), *quantiser)


@converter("piecework::rms_norm_dynamic_quant")
def rms_norm_dynamic_quant(x: Any, weight: Any, eps: float) -> tuple[Any, Any]:
    """With one scale per row."""
    return dynamic_quantize(rms_norm(x, weight, eps))


@converter("piecework::add_rms_norm_quant")
def add_rms_norm_quant(x: Any, residual: Any, weight: Any, eps: float, *quantiser: Any) -> tuple[Any, Any]:
    """Behind a sum."""
    total = add(x, residual)
    return rms_norm_quant(total, weight, eps, *quantiser), total


@converter("piecework::add_rms_norm_dynamic_quant")
def add_rms_norm_dynamic_quant(x: Any, residual: Any, weight: Any, eps: float) -> tuple[Any, Any, Any]:
    """Behind a sum, with one scale per row."""
    total = add(x, residual)
    y, scale = rms_norm_dynamic_quant(total, weight, eps)
    return y, total, scale


@converter("piecework::silu_mul_quant")
def silu_mul_quant(x: Any, *quantiser: Any) -> Any:
    """A gate and what stands behind it, here as below."""
    return quantize(silu_and_mul(x), *quantiser)


@converter("piecework::silu_mul_dynamic_quant")
def silu_mul_dynamic_quant(x: Any) -> tuple[Any, Any]:
    """With one scale per row."""
    return dynamic_quantize(silu_and_mul(x))
