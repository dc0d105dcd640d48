"""What the kernels share: rounding to int8, and how many warps a tile gets."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""The kernels of this process run under Triton's interpreter, on the CPU."""

# Adding 1.5 * 2^23 leaves a float32 no bits behind the point, so the sum is rounded, halves to even.
_ROUNDING = tl.constexpr(12582912.0)


def warps_for(elements: int) -> int:
    """Warps of a program that holds `elements` values in registers: 8 per thread, so 16 bytes a load."""
    return max(1, min(16, elements // 256))


@triton.jit
def to_int8(y):
    """Round float32 to the nearest integer, halves to even, within int8's range."""
    inside = tl.minimum(tl.maximum(y, -128.0), 127.0)
    return ((inside + _ROUNDING) - _ROUNDING).to(tl.int8)


@triton.jit
def quantise_static(y, scale, offset):
    """Float32 y -> int8 with a scale, and an offset or None, known before the run; both pointers."""
    scaled = tl.div_rn(y, tl.load(scale))
    if offset is not None:
        scaled += tl.load(offset)
    return to_int8(scaled)


@triton.jit
def quantise_rows(y):
    """Float32 y [R, B] -> int8 [R, B] and one scale per row [R]; see the op `dynamic_quantize`.

    The largest size is found among the bits: of two positive floats the larger has the larger bits, and
    those of NaN are larger than any other's, which a maximum of floats would drop.
    """
    bits = tl.max(tl.abs(y).to(tl.int32, bitcast=True), 1)
    scale = tl.div_rn(bits.to(tl.float32, bitcast=True), 127.0)
    scaled = tl.where(scale[:, None] > 0, tl.div_rn(y, scale[:, None]), 0.0)
    return to_int8(tl.where(scaled == scaled, scaled, 0.0)), scale
