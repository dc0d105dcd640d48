"""int8 matrices laid out in panels of 16 rows, as kernels of the CPU read them: native/src/laid_panel.h.

Laid out weights are int8 [P, B, 1024]: P panels of 16 rows and B blocks of 64 channels each, in which four
channels of each row follow one another. Numbers count from -128; what exceeds the matrix is not used.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

ROWS, CHANNELS, _FOUR = 16, 64, 4
_STEP = 8  # panels that are laid out at a time: only they are in memory a third time


def laid_shape(rows: int, inputs: int) -> tuple[int, int, int]:
    """Return the shape that weights [rows, inputs] have when they are laid out."""
    return -(-rows // ROWS), -(-inputs // CHANNELS), ROWS * CHANNELS


def lay_out(weight: Tensor) -> Tensor:
    """int8 [N, K] -> [P, B, 1024]."""
    rows, inputs = weight.shape
    laid = weight.new_empty(laid_shape(rows, inputs))
    for first in range(0, len(laid), _STEP):
        part = laid[first : first + _STEP]
        some = weight[first * ROWS : (first + _STEP) * ROWS]
        whole = F.pad(some, (0, -inputs % CHANNELS, 0, -len(some) % ROWS))
        fours = whole.view(len(part), ROWS, -1, CHANNELS // _FOUR, _FOUR).permute(0, 2, 3, 1, 4)
        part.view(fours.shape).copy_(fours)
    return laid.bitwise_xor_(-128)


def rows_of(weight: Tensor, rows: int, inputs: int) -> Tensor:
    """Return int8 [rows, inputs] of weights that are laid out, or in rows as they are."""
    if weight.dim() == 2:
        return weight
    panels, blocks, _ = weight.shape
    fours = weight.bitwise_xor(-128).view(panels, blocks, CHANNELS // _FOUR, ROWS, _FOUR)
    whole: Tensor = fours.permute(0, 3, 1, 2, 4).reshape(panels * ROWS, blocks * CHANNELS)
    return whole[:rows, :inputs]


def width_of(weight: Tensor) -> int:
    """Return the channels of weights [N, K], or of whole blocks of them."""
    return weight.shape[1] if weight.dim() == 2 else weight.shape[1] * CHANNELS


def holds(weight: Tensor, rows: int, inputs: int) -> bool:
    """Whether `weight` has the shape of [rows, inputs], laid out or not."""
    return tuple(weight.shape) in ((rows, inputs), laid_shape(rows, inputs))
