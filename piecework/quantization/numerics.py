"""The numbers of int8 quantisation: scales, rounding, offsets."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from piecework.layers.int8 import StaticInput

INT8_MAX = 127
INT8_MIN = -128


def quantise_rows_(weight: Tensor, out: Tensor) -> Tensor:
    """Quantise weight [N, K] float32 symmetrically per row into out [N, K] int8; returns the scales [N].

    scale = max|w| / 127, q = round(w / scale), halves to even. A row of zeros has scale 1. `weight` is
    overwritten, so that no copy of it is needed. Raises ValueError where it isn't finite.
    """
    low, high = weight.aminmax(dim=1)
    largest = torch.maximum(-low, high)
    if not bool(largest.isfinite().all()):
        raise ValueError("holds values that are not finite")
    scale = torch.where(largest > 0, largest / INT8_MAX, 1.0)
    out.copy_(weight.div_(scale[:, None]).round_().clamp_(INT8_MIN, INT8_MAX))
    return scale


def static_input(low: float, high: float, *, symmetric: bool) -> StaticInput:
    """Return the scale and offset with which int8 covers low..high, which is widened to hold zero.

    Symmetric: max(|low|, |high|) / 127 without an offset. Else 255 steps from low to high, and zero is
    exactly one of them. A range without extent has scale 1.
    """
    low, high = min(low, 0.0), max(high, 0.0)
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(f"the range {low}..{high} is not finite")
    if symmetric:
        return StaticInput(_float32(max(-low, high) / INT8_MAX) or 1.0)
    scale = _float32((high - low) / (INT8_MAX - INT8_MIN)) or 1.0
    offset = round(INT8_MIN - low / scale)
    return StaticInput(scale, max(INT8_MIN, min(INT8_MAX, offset)))


def covering(inputs: list[StaticInput]) -> StaticInput:
    """Return one scale and offset whose range holds the ranges of all `inputs`."""
    if all(one == inputs[0] for one in inputs):
        return inputs[0]
    if not any(one.offset for one in inputs):
        return StaticInput(max(one.scale for one in inputs))
    low = min((INT8_MIN - one.offset) * one.scale for one in inputs)
    high = max((INT8_MAX - one.offset) * one.scale for one in inputs)
    return static_input(low, high, symmetric=False)


def offset_bias(weight: Tensor, offset: int) -> Tensor:
    """Return -offset * sum_k weight[n, k] as int32 [N]: what an input's offset adds to the product, undone.

    Below 2^31 for up to 130,000 inputs.
    """
    return -offset * weight.sum(dim=1, dtype=torch.int32)


def _float32(value: float) -> float:
    """Round to float32, in which scales are kept."""
    return float(torch.tensor(value, dtype=torch.float32))
