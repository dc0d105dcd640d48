"""`linear_blocks`, `linear_block_parts` and `embedding_blocks` on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from piecework.native import library
from piecework.native.types import TYPES
from piecework.ops.block_linear import embedding_blocks, linear_block_parts, linear_blocks, split_parts
from piecework.ops.block_packing import inputs_of
from piecework.ops.cpu.kernels import FLOATS, Kernel, address

_linear_blocks = Kernel(
    "linear_blocks", "x packed bias out", "x_stride out_stride rows outputs inputs kind type"
)
_embedding_blocks = Kernel("embedding_blocks", "ids packed out", "rows inputs groups kind type")


def supports(x: Tensor, packed: Tensor, outputs: int, bias: Tensor | None = None) -> bool:
    """Whether the kernel can run the call."""
    return (
        x.dtype in FLOATS
        and packed.is_contiguous()
        and (bias is None or bias.dtype == x.dtype)
        and library() is not None
    )


@linear_blocks.implement("cpu", supports)
def linear_blocks_cpu(x: Tensor, packed: Tensor, outputs: int, bias: Tensor | None = None) -> Tensor:
    """x [..., K] -> [..., N]; see the reference. A row gives the same whatever rows are beside it."""
    return _run(x, [(packed, outputs)], bias)


def _run(x: Tensor, parts: Sequence[tuple[Tensor, int]], bias: Tensor | None) -> Tensor:
    """Multiply by each of the packed parts, with as many outputs, and put the products side by side."""
    inputs, width = x.shape[-1], sum(outputs for _, outputs in parts)
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, inputs).contiguous()
    out = x.new_empty((*x.shape[:-1], width))
    if bias is not None:
        bias = bias.contiguous()
    first = 0
    for packed, outputs in parts:
        _linear_blocks(
            rows.data_ptr(),
            packed.data_ptr(),
            address(bias if bias is None else bias[first:]),
            out[..., first:].data_ptr(),
            rows.stride(0),
            width,
            rows.shape[0],
            outputs,
            inputs,
            packed.shape[2],
            TYPES[x.dtype],
        )
        first += outputs
    return out


def _supports_parts(
    x: Tensor, packed: Tensor, outputs: Sequence[int], kinds: Sequence[int], bias: Tensor | None = None
) -> bool:
    return supports(x, packed, sum(outputs), bias)


@linear_block_parts.implement("cpu", _supports_parts)
def linear_block_parts_cpu(
    x: Tensor, packed: Tensor, outputs: Sequence[int], kinds: Sequence[int], bias: Tensor | None = None
) -> Tensor:
    """x [..., K] -> [..., N]; see the reference."""
    parts = split_parts(packed, x.shape[-1], outputs, kinds)
    return _run(x, list(zip(parts, outputs, strict=True)), bias)


def _supports_embedding(ids: Tensor, packed: Tensor, dtype: torch.dtype) -> bool:
    return (
        dtype in FLOATS
        and ids.dtype == torch.int64
        and ids.is_contiguous()
        and packed.is_contiguous()
        and library() is not None
    )


@embedding_blocks.implement("cpu", _supports_embedding, inline=True)
def embedding_blocks_cpu(ids: Tensor, packed: Tensor, dtype: torch.dtype) -> Tensor:
    """See the reference. An id out of range, which is an error before, gives a row of NaN."""
    inputs = inputs_of(packed)
    out = torch.empty((*ids.shape, inputs), dtype=dtype)
    _embedding_blocks(
        ids.data_ptr(),
        packed.data_ptr(),
        out.data_ptr(),
        ids.numel(),
        inputs,
        packed.shape[0],
        packed.shape[2],
        TYPES[dtype],
    )
    return out
