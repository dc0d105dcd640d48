"""One kernel for rms_norm and what is fused with it: the addition before, the quantisation behind."""

from __future__ import annotations

import triton
import triton.language as tl

from piecework.ops.triton.kernels.common import quantise_rows, quantise_static


@triton.jit(do_not_specialize=["rows"])
def norm_kernel(
    x,
    residual,
    weight,
    out,
    total,
    scale,
    offset,
    row_scales,
    rows,
    eps,
    x_outer,
    x_inner,
    residual_outer,
    residual_inner,
    INNER: tl.constexpr,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program normalises ROWS rows, which it holds in registers.

    Row r of x begins at (r // INNER) * x_outer + (r % INNER) * x_inner. Absent pointers are None:
    residual and total (no addition), scale (no static quantisation), row_scales (no dynamic one).
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < HIDDEN)[None, :]
    target = row[:, None] * HIDDEN + column[None, :]
    w = tl.load(weight + column, column < HIDDEN, 0.0).to(tl.float32)
    source = (row // INNER) * x_outer + (row % INNER) * x_inner
    value = tl.load(x + source[:, None] + column[None, :], inside, 0.0)
    if residual is not None:
        other = (row // INNER) * residual_outer + (row % INNER) * residual_inner
        added = tl.load(residual + other[:, None] + column[None, :], inside, 0.0)
        value = (value.to(tl.float32) + added.to(tl.float32)).to(x.dtype.element_ty)
        tl.store(total + target, value, inside)
    wide = value.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 1) / HIDDEN + eps)
    normed = (wide * inverse[:, None]).to(x.dtype.element_ty).to(tl.float32) * w[None, :]
    if scale is not None:
        rounded = normed.to(x.dtype.element_ty).to(tl.float32)
        tl.store(out + target, quantise_static(rounded, scale, offset), inside)
    elif row_scales is not None:
        rounded = normed.to(x.dtype.element_ty).to(tl.float32)
        quantised, largest = quantise_rows(rounded)
        tl.store(out + target, quantised, inside)
        tl.store(row_scales + row, largest, row < rows)
    else:
        tl.store(out + target, normed.to(out.dtype.element_ty), inside)
