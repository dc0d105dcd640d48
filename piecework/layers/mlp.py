"""The dense gated MLP (SwiGLU, Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import piecework.ops  # noqa: F401  registers the named ops
from piecework.layers.linear import Linear, PackedLinear

_silu_and_mul = torch.ops.piecework.silu_and_mul.default


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), with gate and up packed into one product."""

    def __init__(
        self, hidden: int, intermediate: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        sizes = (intermediate, intermediate)
        self.gate_up_proj = PackedLinear(hidden, sizes, bias=bias, dtype=dtype, device=device)
        self.down_proj = Linear(intermediate, hidden, bias=bias, dtype=dtype, device=device)

    def forward(self, x: Tensor, num_valid_rows: Tensor | None = None) -> Tensor:
        """x [T, hidden] -> [T, hidden]. Rows don't meet here, so padded ones need no care."""
        y: Tensor = self.down_proj(_silu_and_mul(self.gate_up_proj(x)))
        return y
