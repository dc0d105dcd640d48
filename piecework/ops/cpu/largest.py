"""The largest number of each row, for the sampler: one pass of the library's kernel, on all threads."""

from __future__ import annotations

import torch
from torch import Tensor

from piecework.native.types import TYPES
from piecework.ops.cpu.kernels import Kernel, row_strided

_largest = Kernel("largest", "x best index", "rows size stride type")


def supports_largest(x: Tensor) -> bool:
    """Whether the kernel can run: a float type, whole rows, and at least one number in each."""
    return x.dim() == 2 and x.shape[1] > 0 and row_strided(x)


def largest_cpu(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest numbers [R] float32 of x [R, K], and their indices [R] int64.

    Among equals the lowest index; a row that holds NaN gives the first NaN.
    """
    rows, size = x.shape
    best = torch.empty(rows, dtype=torch.float32)
    index = torch.empty(rows, dtype=torch.int64)
    places = (x.data_ptr(), best.data_ptr(), index.data_ptr())
    _largest(*places, rows, size, x.stride(0), TYPES[x.dtype])
    return best, index
