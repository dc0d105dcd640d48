"""The gate of a SwiGLU block and the two quantisations, apart and in one."""

from __future__ import annotations

import triton
import triton.language as tl

from piecework.ops.triton.kernels.common import quantise_rows, quantise_static


@triton.jit
def _gated(gate, up, dtype: tl.constexpr):
    """silu(gate) * up, rounded to dtype after each of the two."""
    wide = gate.to(tl.float32)
    activated = tl.div_rn(wide, 1.0 + tl.exp(-wide)).to(dtype)
    return activated.to(tl.float32) * up.to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def elementwise_kernel(
    x,
    out,
    scale,
    offset,
    row_scales,
    rows,
    x_outer,
    x_inner,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
):
    """Each program has ROWS rows and BLOCK of the WIDTH channels of the result.

    GATED: x has 2 * WIDTH channels, and silu(first half) * second half goes on. With `scale` the result
    is quantised statically; with `row_scales` dynamically, and then BLOCK holds a whole row.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    target = row[:, None] * WIDTH + column[None, :]
    start = (row // INNER) * x_outer + (row % INNER) * x_inner
    source = x + start[:, None] + column[None, :]
    value = tl.load(source, inside, 0.0)
    if GATED:
        value = _gated(value, tl.load(source + WIDTH, inside, 0.0), x.dtype.element_ty)
    rounded = value.to(x.dtype.element_ty)
    if scale is not None:
        tl.store(out + target, quantise_static(rounded.to(tl.float32), scale, offset), inside)
    elif row_scales is not None:
        quantised, largest = quantise_rows(rounded.to(tl.float32))
        tl.store(out + target, quantised, inside)
        tl.store(row_scales + row, largest, row < rows)
    else:
        tl.store(out + target, rounded, inside)
