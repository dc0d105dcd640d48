"""A mixture of experts: a router and gated MLPs of which each token uses a few."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import piecework.ops  # noqa: F401  registers the named ops
from piecework.layers.linear import Linear
from piecework.layers.parameter import parameter

_moe = torch.ops.piecework.moe.default


class Experts(nn.Module):
    """The experts' weights: w13 [E, 2 * I, H] (gate rows, then up rows) and w2 [E, H, I]."""

    def __init__(
        self, experts: int, hidden: int, intermediate: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.w13 = parameter(experts, 2 * intermediate, hidden, dtype=dtype, device=device)
        self.w2 = parameter(experts, hidden, intermediate, dtype=dtype, device=device)


class MoE(nn.Module):
    """Softmax routing to the `top_k` best experts; `renormalize` makes their weights sum to one."""

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        experts: int,
        top_k: int,
        *,
        renormalize: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.gate = Linear(hidden, experts, bias=False, dtype=dtype, device=device)
        self.experts = Experts(experts, hidden, intermediate, dtype=dtype, device=device)
        self.top_k = top_k
        self.renormalize = renormalize

    def forward(self, x: Tensor, num_valid_rows: Tensor | None = None) -> Tensor:
        """x [T, hidden] -> [T, hidden]. Rows from num_valid_rows [1] on are padding: no expert sees them."""
        y: Tensor = _moe(
            x,
            self.gate(x),
            self.experts.w13,
            self.experts.w2,
            self.top_k,
            self.renormalize,
            num_valid_rows,
        )
        return y

    def extra_repr(self) -> str:
        """Show the routing in the model's repr."""
        return f"top_k={self.top_k}, renormalize={self.renormalize}"
