"""`embedding` and `linear`: table look-up and matrix product."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from piecework.ops.registry import define


def _embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """ids [T], weight [V, H] -> [T, H]. Ids must be checked before: an id out of range is undefined."""
    return F.embedding(ids, weight)


def _embedding_fake(ids: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty((*ids.shape, weight.shape[1]))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K], weight [N, K], bias [N] -> [..., N]."""
    return F.linear(x, weight, bias)


def _linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    torch._check(x.shape[-1] == weight.shape[1])
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


embedding = define("embedding(Tensor ids, Tensor weight) -> Tensor", _embedding, _embedding_fake)
linear = define("linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor", _linear, _linear_fake)
