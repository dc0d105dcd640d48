"""`quantize` and `dynamic_quantize`: from floating point to int8, per tensor and per token."""

from __future__ import annotations

import torch
from torch import Tensor

from piecework.ops.registry import define

INT8_MAX = 127.0


def to_int8(x: Tensor) -> Tensor:
    """Round to the nearest integer, halves to even, and clamp into int8's range."""
    return x.round().clamp(-128, 127).to(torch.int8)


def _quantize(x: Tensor, scale: Tensor, reciprocal: Tensor, offset: Tensor | None = None) -> Tensor:
    """q = clamp(round(x / scale + offset), -128, 127); x [..., K] -> int8 [..., K].

    `scale`, `reciprocal` = 1 / scale and `offset` are [1] float32, known before the run. Vendors' kernels
    differ in which of the two they take, so the op has both and no graph holds a division for it.
    """
    y = x.float() / scale
    return to_int8(y if offset is None else y + offset)


def _quantize_fake(x: Tensor, scale: Tensor, reciprocal: Tensor, offset: Tensor | None = None) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.int8)


def _dynamic_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """One symmetric scale per row: scale = max|x| / 127, q = round(x / scale).

    x [..., K] -> (int8 [..., K], scale [..., 1] float32). A row of zeros has scale 0 and gives zeros. A row
    that holds NaN or infinity has that as its scale, so what is computed from it is NaN, as without
    quantisation.
    """
    wide = x.float()
    largest = wide.abs().amax(-1, keepdim=True)
    scale = largest / INT8_MAX
    return to_int8(torch.where(scale > 0, wide / scale, 0.0).nan_to_num(0.0)), scale


def _dynamic_quantize_fake(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


quantize = define(
    "quantize(Tensor x, Tensor scale, Tensor reciprocal, Tensor? offset=None) -> Tensor",
    _quantize,
    _quantize_fake,
)
dynamic_quantize = define(
    "dynamic_quantize(Tensor x) -> (Tensor, Tensor)", _dynamic_quantize, _dynamic_quantize_fake
)
