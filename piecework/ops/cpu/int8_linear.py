"""`linear_w8a8`, `linear_w8` and `embedding_int8` on the CPU, by the library's kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from piecework.native import library, reads_panels
from piecework.native.types import TYPES
from piecework.ops.cpu.kernels import FLOATS, Kernel, address, contiguous, row_stride, row_strided
from piecework.ops.int8_linear import embedding_int8, linear_w8, linear_w8a8
from piecework.ops.int8_panels import width_of

_linear_w8a8 = Kernel(
    "linear_w8a8",
    "x weight scale x_scale quant_bias bias out",
    "rows outputs inputs x_stride type bias_type laid",
)
_linear_w8 = Kernel(
    "linear_w8", "x weight scale bias out", "rows outputs inputs x_stride type bias_type laid"
)
_embedding_int8 = Kernel("embedding_int8", "ids weight scale out", "rows inputs vocabulary type laid")
_MOST_CHANNELS = 1 << 17
"""From here on a sum of products may leave int32."""


def _readable(weight: Tensor) -> bool:
    return weight.dtype == torch.int8 and (weight.dim() == 2 or reads_panels())


def _supports_w8a8(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    x_scale: Tensor | None,
    quant_bias: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> bool:
    return (
        x.dtype == torch.int8
        and _readable(weight)
        and dtype in FLOATS
        and (bias is None or bias.dtype in FLOATS)
        and x.shape[-1] < _MOST_CHANNELS
        and contiguous(x, weight, scale, x_scale, quant_bias, bias)
        and library() is not None
    )


@linear_w8a8.implement("cpu", supports=_supports_w8a8)
def linear_w8a8_cpu(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    x_scale: Tensor | None,
    quant_bias: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """See the reference. The product is exact; scales and bias are applied as each block of it is done."""
    n, k = scale.shape[0], x.shape[-1]
    out = torch.empty((*x.shape[:-1], n), dtype=dtype)
    _linear_w8a8(
        x.data_ptr(),
        weight.data_ptr(),
        scale.data_ptr(),
        address(x_scale),
        address(quant_bias),
        address(bias),
        out.data_ptr(),
        x.numel() // k,
        n,
        k,
        k,
        TYPES[dtype],
        0 if bias is None else TYPES[bias.dtype],
        int(weight.dim() == 3),
    )
    return out


def _supports_w8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> bool:
    return (
        _readable(weight)
        and (bias is None or bias.dtype in FLOATS)
        and contiguous(weight, scale, bias)
        and row_strided(x)
    )


@linear_w8.implement("cpu", supports=_supports_w8)
def linear_w8_cpu(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """As the reference, but that the product stays in float32 until it is scaled.

    With AVX-512, 16-bit floats in few rows (docs/quantisation.md) are rounded to integers of 16 bits, whose
    product is exact: the largest of a row is 127 * 256.
    """
    n, k = scale.shape[0], x.shape[-1]
    out = x.new_empty((*x.shape[:-1], n))
    _linear_w8(
        x.data_ptr(),
        weight.data_ptr(),
        scale.data_ptr(),
        address(bias),
        out.data_ptr(),
        x.numel() // k,
        n,
        k,
        row_stride(x),
        TYPES[x.dtype],
        0 if bias is None else TYPES[bias.dtype],
        int(weight.dim() == 3),
    )
    return out


def _supports_embedding(ids: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> bool:
    return (
        dtype in FLOATS
        and ids.dtype == torch.int64
        and _readable(weight)
        and contiguous(ids, weight, scale)
        and library() is not None
    )


@embedding_int8.implement("cpu", supports=_supports_embedding, inline=True)
def embedding_int8_cpu(ids: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """See the reference. An id out of range, which is an error before, gives a row of NaN."""
    vocabulary, inputs = scale.shape[0], width_of(weight)
    out = torch.empty((*ids.shape, inputs), dtype=dtype)
    _embedding_int8(
        ids.data_ptr(),
        weight.data_ptr(),
        scale.data_ptr(),
        out.data_ptr(),
        ids.numel(),
        inputs,
        vocabulary,
        TYPES[dtype],
        int(weight.dim() == 3),
    )
    return out
