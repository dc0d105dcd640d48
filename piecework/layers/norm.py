"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import piecework.ops  # noqa: F401  registers the named ops
from piecework.layers.parameter import parameter

_rms_norm = torch.ops.piecework.rms_norm.default


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, with weight [size]."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = parameter(size, dtype=dtype, device=device)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape."""
        y: Tensor = _rms_norm(x, self.weight, self.eps)
        return y

    def extra_repr(self) -> str:
        """Show the size and eps in the model's repr."""
        return f"{self.weight.shape[0]}, eps={self.eps}"
