"""`linear_w8a8`, `linear_w8` and `embedding_int8`: matrix products with int8 weights, and rows of them.

A weight [N, K] may be laid out in panels instead (int8_panels.py); N is then known by the scale.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from piecework.ops.int8_panels import holds, rows_of, width_of
from piecework.ops.registry import define


def int8_product(x: Tensor, weight: Tensor) -> Tensor:
    """The exact int32 product x weight^T of int8 x [..., K] and weight [N, K].

    Each product of a block of 256 channels is at most 2^22 in size and so exact in float32.
    """
    total = x.new_zeros((*x.shape[:-1], weight.shape[0]), dtype=torch.int32)
    for start in range(0, weight.shape[1], 256):
        part = F.linear(x[..., start : start + 256].float(), weight[:, start : start + 256].float())
        total = total + part.to(torch.int32)
    return total


def _linear_w8a8(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    x_scale: Tensor | None,
    quant_bias: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """y = (x weight^T + quant_bias) * scale * x_scale + bias, with an exact int32 product.

    Args:
        x: int8 [..., K].
        weight: int8 [N, K], or laid out.
        scale: [N] float32: the weight's scale of each output, times the input's scale if that is static.
        x_scale: [..., 1] float32, the input's scale of each row; None where it is static.
        quant_bias: [N] int32, minus the input's offset times the sums of the weight's rows, and a bias
            that a checkpoint has folded into it.
        bias: [N] of any floating-point dtype.
        dtype: of the result [..., N]; everything after the product is computed in float32.
    """
    product = int8_product(x, rows_of(weight, scale.shape[0], x.shape[-1]))
    if quant_bias is not None:
        product = product + quant_bias
    y = product.float() * scale
    if x_scale is not None:
        y = y * x_scale
    if bias is not None:
        y = y + bias.float()
    return y.to(dtype)


def _linear_w8a8_fake(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    x_scale: Tensor | None,
    quant_bias: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    torch._check(holds(weight, scale.shape[0], x.shape[-1]))
    return x.new_empty((*x.shape[:-1], scale.shape[0]), dtype=dtype)


def _linear_w8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x (weight * scale)^T + bias: x [..., K], weight int8 [N, K], scale [N] float32, bias [N].

    The product is computed in x's dtype on the unscaled weight, which every dtype of 8 bits or more holds
    exactly, and scaled in float32.
    """
    y = F.linear(x, rows_of(weight, scale.shape[0], x.shape[-1]).to(x.dtype)).float() * scale
    return (y if bias is None else y + bias.float()).to(x.dtype)


def _linear_w8_fake(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    torch._check(holds(weight, scale.shape[0], x.shape[-1]))
    return x.new_empty((*x.shape[:-1], scale.shape[0]))


def _embedding_int8(ids: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """ids [T], weight int8 [V, H], scale [V] float32 -> weight * scale of these rows, [T, H] in `dtype`.

    A weight that is laid out has whole blocks. Ids must be checked before.
    """
    rows = rows_of(weight, scale.shape[0], width_of(weight))
    return (rows[ids].float() * scale[ids].unsqueeze(-1)).to(dtype)


def _embedding_int8_fake(ids: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.new_empty((*ids.shape, width_of(weight)), dtype=dtype)


linear_w8a8 = define(
    "linear_w8a8(Tensor x, Tensor weight, Tensor scale, Tensor? x_scale, Tensor? quant_bias, "
    "Tensor? bias, ScalarType dtype) -> Tensor",
    _linear_w8a8,
    _linear_w8a8_fake,
)
linear_w8 = define(
    "linear_w8(Tensor x, Tensor weight, Tensor scale, Tensor? bias=None) -> Tensor",
    _linear_w8,
    _linear_w8_fake,
)
embedding_int8 = define(
    "embedding_int8(Tensor ids, Tensor weight, Tensor scale, ScalarType dtype) -> Tensor",
    _embedding_int8,
    _embedding_int8_fake,
)
