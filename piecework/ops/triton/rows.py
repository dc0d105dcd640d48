"""How a tensor's rows lie in memory, and how many a program takes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

# The most channels of a row that a program holds in registers, 32 for each of its threads at most.
MAX_WIDTH = 16384
_TILE = 1024


@dataclass(frozen=True)
class Rows:
    """`count` rows of `tensor`: row r begins at (r // inner) * outer + (r % inner) * step."""

    tensor: Tensor
    count: int
    inner: int
    outer: int
    step: int


def rows_of(x: Tensor) -> Rows:
    """Describe the rows of x [..., H]; a layout that two strides can't describe is copied."""
    width = x.shape[-1]
    if x.is_contiguous():
        return Rows(x, x.numel() // width, 1, width, 0)
    if x.stride(-1) == 1 and x.dim() == 2:
        return Rows(x, x.shape[0], 1, x.stride(0), 0)
    if x.stride(-1) == 1 and x.dim() == 3:
        return Rows(x, x.shape[0] * x.shape[1], x.shape[1], x.stride(0), x.stride(1))
    return rows_of(x.contiguous())


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n, which is at least 1."""
    return 1 << (n - 1).bit_length()


def rows_per_program(block: int) -> int:
    """Rows of `block` channels for one program: more than one where rows are short."""
    return max(1, min(8, _TILE // block))
