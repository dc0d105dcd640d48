"""A matrix product with int8 weights, and the scaling behind it in the same launch."""

from __future__ import annotations

import triton
import triton.language as tl

from piecework.ops.triton.kernels.common import INTERPRETED


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    x,
    weight,
    out,
    scale,
    x_scale,
    quant_bias,
    bias,
    rows,
    N,
    K,
    x_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """out [rows, N] = (x weight^T + quant_bias) * scale * x_scale + bias; absent pointers are None.

    With int8 x the product is exact in int32; otherwise the weight is converted to x's dtype and the
    product, rounded to that, is what gets scaled. Programs that share columns of the weight run close
    together (GROUP blocks of rows), so that the second level cache serves them.
    """
    pid = tl.program_id(0)
    blocks_m = tl.cdiv(rows, BLOCK_M)
    blocks_n = tl.cdiv(N, BLOCK_N)
    first = (pid // (GROUP * blocks_n)) * GROUP
    height = tl.minimum(blocks_m - first, GROUP)
    block_m = first + (pid % (GROUP * blocks_n)) % height
    block_n = (pid % (GROUP * blocks_n)) // height
    row = (block_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = (block_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    a_at = x + row[:, None] * x_stride + k[None, :]
    b_at = weight + column[None, :] * K + k[:, None]
    a_there = row[:, None] < rows
    b_there = column[None, :] < N
    integer: tl.constexpr = x.dtype.element_ty == tl.int8
    product = tl.zeros((BLOCK_M, BLOCK_N), tl.int32 if integer else tl.float32)
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_at, a_there, 0)
            b = tl.load(b_at, b_there, 0)
        else:
            left = k < K - start
            a = tl.load(a_at, a_there & left[None, :], 0)
            b = tl.load(b_at, b_there & left[:, None], 0)
        if integer:
            product = tl.dot(a, b, product, out_dtype=tl.int32)
        elif INTERPRETED:  # whose dot takes bfloat16 for integers
            product += tl.dot(a.to(tl.float32), b.to(tl.float32))
        else:
            product = tl.dot(a, b.to(x.dtype.element_ty), product, input_precision="ieee")
        a_at += BLOCK_K
        b_at += BLOCK_K
    if quant_bias is not None:
        product += tl.load(quant_bias + column, column < N, 0)[None, :]
    if not integer:
        product = product.to(x.dtype.element_ty)
    y = product.to(tl.float32) * tl.load(scale + column, column < N, 0.0)[None, :]
    if x_scale is not None:
        y = y * tl.load(x_scale + row, row < rows, 0.0)[:, None]
    if bias is not None:
        y = y + tl.load(bias + column, column < N, 0.0).to(tl.float32)[None, :]
    at = out + row[:, None] * N + column[None, :]
    tl.store(at, y.to(out.dtype.element_ty), a_there & b_there)
