"""How far a rewrite may change numbers, and how far it did."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Bound:
    """The largest allowed error by dtype of the result; all zero means the same bits.

    The error of a floating-point result is the largest difference within a row (the last dimension)
    over the largest magnitude in that row. That of an integer result is the largest difference; at most the
    share `integers_off` of a result may differ at all, or one number of it.
    """

    float32: float = 0.0
    float16: float = 0.0
    bfloat16: float = 0.0
    integer: float = 0.0
    integers_off: float = 1.0

    @property
    def bitwise(self) -> bool:
        """Whether the rewrite claims to give the same bits."""
        return not (self.float32 or self.float16 or self.bfloat16 or self.integer)

    def allowed(self, dtype: torch.dtype) -> float:
        """The largest error that a result of `dtype` may have."""
        if not dtype.is_floating_point:
            return self.integer
        if dtype in (torch.float16, torch.bfloat16):
            return self.float16 if dtype is torch.float16 else self.bfloat16
        return self.float32

    def __str__(self) -> str:
        if self.bitwise:
            return "bitwise"
        parts = {"float32": self.float32, "float16": self.float16, "bfloat16": self.bfloat16}
        text = ", ".join(f"{name} {value:g}" for name, value in parts.items())
        return text + (f", integer {self.integer:g}" if self.integer else "")

    def too_many(self, got: Tensor, expected: Tensor) -> float | None:
        """The share of integers that differ, where it is more than may; else None."""
        if got.dtype.is_floating_point or got.shape != expected.shape or not got.numel():
            return None
        off = int((got != expected).sum())
        return off / got.numel() if off > max(1, self.integers_off * got.numel()) else None


BITWISE = Bound()


def tolerance(
    float32: float = 1e-5,
    float16: float = 2e-3,
    bfloat16: float = 1.6e-2,
    integer: float = 0.0,
    integers_off: float = 1.0,
) -> Bound:
    """Return a bound that is not bitwise; the defaults are about two units in the last place of 16 bits."""
    return Bound(float32, float16, bfloat16, integer, integers_off)


def error(got: Tensor, expected: Tensor) -> float:
    """The error of `got` as `Bound` defines it; infinite where shape, dtype, NaN or infinity differ.

    0.0 means that all bits are equal, but for those inside a NaN. Magnitudes below 2^23 smallest normal
    numbers count as nothing, so that a kernel may flush denormals to zero.
    """
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return math.inf
    if got.numel() == 0 or _same_bits(got, expected):
        return 0.0
    if not got.dtype.is_floating_point:
        return (got.to(torch.float64) - expected.to(torch.float64)).abs().max().item()
    finite = expected.isfinite()
    if not torch.equal(finite, got.isfinite()):
        return math.inf
    special = ~finite
    if not torch.equal(got[special].nan_to_num(), expected[special].nan_to_num()):
        return math.inf
    # Widened, so that the difference of two large half-precision numbers can't overflow.
    zero = torch.zeros((), dtype=torch.float64, device=got.device)
    wide, reference = got.to(torch.float64), expected.to(torch.float64)
    difference = torch.where(finite, (wide - reference).abs(), zero)
    magnitude = torch.where(finite, reference.abs(), zero)
    if got.ndim:
        difference, magnitude = difference.amax(-1), magnitude.amax(-1)
    floor = torch.finfo(got.dtype).tiny * 2.0**23 if got.dtype is not torch.float16 else 0.0
    measured = (difference / magnitude.clamp_min(max(floor, 1e-300))).max().item()
    # Not the same bits, so never zero: a difference among denormals still isn't bitwise.
    return max(measured, math.ulp(0.0))


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    bits = _BITS[a.element_size()]
    # view(dtype) asks for a dense last dimension; contiguous() is free where it is one.
    same = a.contiguous().view(bits) == b.contiguous().view(bits)
    return bool((same | (a.isnan() & b.isnan())).all().item())
