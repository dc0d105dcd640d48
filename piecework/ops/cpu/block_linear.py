"""`linear_blocks` and `embedding_blocks` on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from piecework.native import library
from piecework.native.types import TYPES
from piecework.ops.block_linear import BLOCK, embedding_blocks, linear_blocks
from piecework.ops.cpu.kernels import FLOATS, Kernel, address

_linear_blocks = Kernel("linear_blocks", "x packed bias out", "x_stride rows outputs inputs kind type")
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
    inputs = packed.shape[1] * BLOCK
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, inputs).contiguous()
    out = x.new_empty((*x.shape[:-1], outputs))
    if bias is not None:
        bias = bias.contiguous()
    _linear_blocks(
        rows.data_ptr(),
        packed.data_ptr(),
        address(bias),
        out.data_ptr(),
        rows.stride(0),
        rows.shape[0],
        outputs,
        inputs,
        packed.shape[2],
        TYPES[x.dtype],
    )
    return out


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
    groups, blocks, kind = packed.shape
    out = torch.empty((*ids.shape, blocks * BLOCK), dtype=dtype)
    _embedding_blocks(
        ids.data_ptr(),
        packed.data_ptr(),
        out.data_ptr(),
        ids.numel(),
        blocks * BLOCK,
        groups,
        kind,
        TYPES[dtype],
    )
    return out
