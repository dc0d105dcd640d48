"""What layers do whose weights are divided between the ranks of a tensor-parallel group."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import piecework.ops  # noqa: F401  registers the named ops

all_reduce: Callable[[Tensor], Tensor] = torch.ops.piecework.all_reduce.default
"""all_reduce(x) -> the sum over all ranks of what each has, in x's shape."""


def own_rows(table: Callable[[Tensor], Tensor], ids: Tensor, first: int, rows: int) -> Tensor:
    """Embed ids [T] by the rows `first` to `first + rows` of a vocabulary, which `table` has -> [T, size].

    Tokens of other ranks give zeros, so that the sum over the ranks has each token's row once.
    """
    local = ids - first
    foreign = (local < 0) | (local >= rows)
    return table(local.clamp(0, rows - 1)).masked_fill(foreign.unsqueeze(-1), 0.0)
