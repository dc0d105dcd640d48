"""`rms_norm`: root-mean-square normalisation over the last dimension."""

from __future__ import annotations

import torch
from torch import Tensor

from piecework.ops.registry import define


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019, arXiv:1910.07467).

    x [..., H], weight [H] -> [..., H]. Computed in float32 and rounded to x's dtype before the product
    with the weight, as the Llama family is trained.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def _rms_norm_fake(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype))


rms_norm = define("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", _rms_norm, _rms_norm_fake)
