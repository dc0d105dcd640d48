"""`linear` and `embedding` on the CPU: kernels over weights as they lie, and torch where they can't run."""

from __future__ import annotations

import torch
from torch import Tensor

from piecework.native import library
from piecework.native.types import TYPES
from piecework.ops.cpu.kernels import FLOATS, Kernel, address
from piecework.ops.linear import embedding, linear

_linear = Kernel("linear", "x weight bias out", "x_stride weight_stride rows outputs inputs type")
_embedding = Kernel("embedding", "ids weight out", "rows width weight_stride vocabulary")


def supports(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether the kernel can run the call: one float type for all, each row without gaps."""
    kind = weight.dtype
    return (
        kind in FLOATS
        and x.dtype == kind
        and weight.stride(1) == 1
        and (bias is None or bias.dtype == kind)
        and library() is not None
    )


@linear.implement("cpu", supports)
def linear_cpu(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K], weight [N, K], bias [N] -> [..., N]. A row gives the same whatever rows are beside it."""
    outputs, inputs = weight.shape
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, inputs).contiguous()
    out = x.new_empty((*x.shape[:-1], outputs))
    if bias is not None:
        bias = bias.contiguous()
    _linear(
        rows.data_ptr(),
        weight.data_ptr(),
        address(bias),
        out.data_ptr(),
        rows.stride(0),
        weight.stride(0),
        rows.shape[0],
        outputs,
        inputs,
        TYPES[weight.dtype],
    )
    return out


def _supports_embedding(ids: Tensor, weight: Tensor) -> bool:
    return (
        weight.dtype in FLOATS
        and ids.dtype == torch.int64
        and ids.is_contiguous()
        and weight.stride(1) == 1
        and library() is not None
    )


@embedding.implement("cpu", _supports_embedding, inline=True)
def embedding_cpu(ids: Tensor, weight: Tensor) -> Tensor:
    """ids [T], weight [V, H] -> [T, H]. An id out of range, which is an error before, gives a row of NaN."""
    vocabulary, size = weight.shape
    out = weight.new_empty((*ids.shape, size))
    _embedding(
        ids.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        ids.numel(),
        size * weight.itemsize,
        weight.stride(0) * weight.itemsize,
        vocabulary,
    )
    return out
