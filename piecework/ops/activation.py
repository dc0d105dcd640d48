"""`silu_and_mul`: the gate of a SwiGLU block."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from piecework.ops.registry import define


def _silu_and_mul(x: Tensor) -> Tensor:
    """silu(x[..., :I]) * x[..., I:] (Shazeer 2020, arXiv:2002.05202); x [..., 2I] -> [..., I]."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def _silu_and_mul_fake(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


silu_and_mul = define("silu_and_mul(Tensor x) -> Tensor", _silu_and_mul, _silu_and_mul_fake)
