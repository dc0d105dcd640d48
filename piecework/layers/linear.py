"""Linear layers, one of them with several projections packed into one product."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import piecework.ops  # noqa: F401  registers the named ops
from piecework.layers.parameter import parameter

_linear = torch.ops.piecework.linear.default


class Linear(nn.Module):
    """y = x W^T + b with W [outputs, inputs] and b [outputs]; `bias` says whether there is b."""

    def __init__(
        self, inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = parameter(outputs, inputs, dtype=dtype, device=device)
        self.bias = parameter(outputs, dtype=dtype, device=device) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [T, inputs] -> [T, outputs]."""
        y: Tensor = _linear(x, self.weight, self.bias)
        return y

    def extra_repr(self) -> str:
        """Show the sizes in the model's repr."""
        outputs, inputs = self.weight.shape
        return f"{inputs}, {outputs}, bias={self.bias is not None}"


class PackedLinear(Linear):
    """Several projections of the same input as one product; their rows lie one after the other.

    `sizes` are the outputs of each. The model's `packed_modules` says which names of the checkpoint
    they have.
    """

    def __init__(
        self, inputs: int, sizes: tuple[int, ...], *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(inputs, sum(sizes), bias=bias, dtype=dtype, device=device)
        self.sizes = sizes
