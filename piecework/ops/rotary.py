"""`rotary`: rotary position embedding of queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor

from piecework.ops.registry import define


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    a = first * cos - second * sin
    b = second * cos + first * sin
    out = torch.stack((a, b), -1).flatten(-2) if interleaved else torch.cat((a, b), -1)
    return torch.cat((out.to(x.dtype), rest), -1)


def _rotary(
    positions: Tensor, q: Tensor, k: Tensor, cos_sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Turn pairs of channels by an angle that grows with the position (Su et al. 2021, arXiv:2104.09864).

    positions [T] int64, q [T, Hq, D], k [T, Hkv, D], cos_sin [max_position, R] float32 with the cosines
    in the first half of R and the sines in the second. R <= D: later channels pass through. Pairs are
    (i, i + R/2), or (2i, 2i + 1) when `interleaved`. Computed in float32, returned in q's dtype.
    """
    cos, sin = cos_sin[positions].unsqueeze(-2).chunk(2, -1)
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)


def _rotary_fake(
    positions: Tensor, q: Tensor, k: Tensor, cos_sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


rotary = define(
    "rotary(Tensor positions, Tensor q, Tensor k, Tensor cos_sin, bool interleaved=False) "
    "-> (Tensor, Tensor)",
    _rotary,
    _rotary_fake,
)
