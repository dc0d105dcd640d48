"""`linear_coded` and `embedding_coded` on the CPU, and how weights become coded."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from piecework.native import library, reads_panels
from piecework.ops.coded_linear import coded_counts, coded_size, embedding_coded, linear_coded
from piecework.ops.cpu.kernels import Kernel, address

_code = Kernel("code", "weight coded spilled", "weight_stride outputs inputs")
_linear_coded = Kernel("linear_coded", "x coded bias out", "x_stride rows outputs inputs")
_embedding_coded = Kernel("embedding_coded", "ids coded out", "rows outputs inputs")


def code(weight: Tensor) -> Tensor | None:
    """Code a matrix, bfloat16 [N, K] with whole rows, on the CPU, for which the library must be there.

    -> uint8 [coded_size(N, K)], or None where more blocks than there are slots for would be spilled.
    """
    rows, inputs = weight.shape
    # numpy asks the system for zeroed pages: slots that nothing is written to take no memory.
    coded = torch.from_numpy(np.zeros(coded_size(rows, inputs), dtype=np.uint8))
    spilled = torch.zeros(1, dtype=torch.int64)
    places = (weight.data_ptr(), coded.data_ptr(), spilled.data_ptr())
    _code(*places, weight.stride(0), rows, inputs)
    return coded if spilled.item() <= coded_counts(rows, inputs)[1] else None


def supports(x: Tensor, coded: Tensor, outputs: int, bias: Tensor | None = None) -> bool:
    """Whether the kernel can run the call."""
    return (
        x.dtype == torch.bfloat16
        and (bias is None or bias.dtype == x.dtype)
        and coded.is_contiguous()
        and reads_panels()
    )


@linear_coded.implement("cpu", supports)
def linear_coded_cpu(x: Tensor, coded: Tensor, outputs: int, bias: Tensor | None = None) -> Tensor:
    """x [..., K] -> [..., N]; see the reference. A row gives the same whatever rows are beside it."""
    inputs = x.shape[-1]
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, inputs).contiguous()
    out = x.new_empty((*x.shape[:-1], outputs))
    if bias is not None:
        bias = bias.contiguous()
    places = (rows.data_ptr(), coded.data_ptr(), address(bias), out.data_ptr())
    _linear_coded(*places, rows.stride(0), rows.shape[0], outputs, inputs)
    return out


def _supports_embedding(ids: Tensor, coded: Tensor, vocab_size: int, size: int) -> bool:
    return (
        ids.dtype == torch.int64 and ids.is_contiguous() and coded.is_contiguous() and library() is not None
    )


@embedding_coded.implement("cpu", _supports_embedding, inline=True)
def embedding_coded_cpu(ids: Tensor, coded: Tensor, vocab_size: int, size: int) -> Tensor:
    """See the reference. An id out of range, which is an error before, gives a row of NaN."""
    out = torch.empty((*ids.shape, size), dtype=torch.bfloat16)
    _embedding_coded(ids.data_ptr(), coded.data_ptr(), out.data_ptr(), ids.numel(), vocab_size, size)
    return out
