"""Parameters that are allocated and nothing else: a checkpoint fills them."""

from __future__ import annotations

import torch
from torch import nn


def parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Return an uninitialised parameter without gradient."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
