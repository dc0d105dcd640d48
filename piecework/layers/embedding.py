"""Token embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import piecework.ops  # noqa: F401  registers the named ops
from piecework.layers.parameter import parameter

_embedding = torch.ops.piecework.embedding.default
_linear = torch.ops.piecework.linear.default


class Embedding(nn.Module):
    """One row of weight [vocab_size, size] per token id. The caller checks that ids are in range."""

    def __init__(self, vocab_size: int, size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = parameter(vocab_size, size, dtype=dtype, device=device)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [T] int64 -> [T, size]."""
        rows: Tensor = _embedding(ids, self.weight)
        return rows

    def project(self, x: Tensor) -> Tensor:
        """x [T, size] -> the product with each row, [T, vocab_size]: the head of a model that ties it."""
        y: Tensor = _linear(x, self.weight, None)
        return y

    def extra_repr(self) -> str:
        """Show the sizes in the model's repr."""
        return ", ".join(str(n) for n in self.weight.shape)
