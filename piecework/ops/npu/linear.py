"""Products with int8 weights on NPUs. Weights are [N, K] and are passed as a transposed view."""

from __future__ import annotations

import torch
from torch import Tensor

from piecework.ops import int8_linear
from piecework.ops.npu.quantize import HALVES
from piecework.ops.npu.vendor import available, call


def _supports_w8a8(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    x_scale: Tensor | None,
    quant_bias: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> bool:
    return available() and dtype in HALVES


@int8_linear.linear_w8a8.implement("npu", supports=_supports_w8a8)
def linear_w8a8(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    x_scale: Tensor | None,
    quant_bias: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """See the reference. The int32 bias goes into the product, the other one is added to the result.

    So that one is added after the rounding to `dtype`.
    """
    (y,) = call(
        "npu_quant_matmul",
        x1=x.reshape(-1, x.shape[-1]),
        x2=weight.t(),
        scale=scale,
        pertoken_scale=None if x_scale is None else x_scale.reshape(-1),
        bias=quant_bias,
        output_dtype=dtype,
    )
    y = y.view(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias.to(dtype)


def _supports_w8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> bool:
    return available() and x.dtype in HALVES


@int8_linear.linear_w8.implement("npu", supports=_supports_w8)
def linear_w8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """See the reference. The function wants its scales in x's dtype, which rounds them."""
    (y,) = call(
        "npu_weight_quant_batchmatmul",
        x=x.reshape(-1, x.shape[-1]),
        weight=weight.t(),
        antiquant_scale=scale.to(x.dtype),
    )
    y = y.view(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias.to(x.dtype)
