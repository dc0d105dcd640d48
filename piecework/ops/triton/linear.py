"""linear_w8a8 and linear_w8: products with int8 weights, scaled in the same launch."""

from __future__ import annotations

import torch
from torch import Tensor

from piecework.ops import int8_linear
from piecework.ops.triton.available import FLOATS, usable, usable_float
from piecework.ops.triton.rows import power_of_two

# Rows of the output -> (BLOCK_M, BLOCK_N, BLOCK_K, warps, stages). One row of blocks reads each weight
# once, so small batches want narrow blocks: as many programs as there are multiprocessors.
_SHAPES = {
    16: (16, 32, 256, 4, 4),
    32: (32, 32, 256, 4, 4),
    64: (64, 64, 128, 4, 4),
    128: (128, 128, 128, 8, 3),
}
_FLOAT32 = (16, 32, 32, 4, 2)  # multiplied without tensor cores, where larger tiles don't fit the registers
_GROUP = 8
_FEW_COLUMNS = 4096


def _shape(rows: int, columns: int, itemsize: int) -> tuple[int, int, int, int, int]:
    if itemsize == 4:
        return _FLOAT32
    m, n, k, warps, stages = _SHAPES[min(128, max(16, power_of_two(rows)))]
    if m <= 32 and columns < _FEW_COLUMNS:
        n = 16
    return m, n, max(32, k // itemsize), warps, stages


def _launch(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    x_scale: Tensor | None,
    quant_bias: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    from piecework.ops.triton.kernels.linear import linear_kernel

    columns, depth = weight.shape
    flat = x.reshape(-1, depth)
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    rows = flat.shape[0]
    out = torch.empty((*x.shape[:-1], columns), dtype=dtype, device=x.device)
    if rows == 0:
        return out
    m, n, k, warps, stages = _shape(rows, columns, x.itemsize)
    linear_kernel[(-(-rows // m) * -(-columns // n),)](
        flat,
        weight,
        out,
        scale,
        x_scale,
        quant_bias,
        bias,
        rows,
        columns,
        depth,
        flat.stride(0) if rows > 1 else depth,
        BLOCK_M=m,
        BLOCK_N=n,
        BLOCK_K=k,
        GROUP=_GROUP,
        EVEN_K=depth % k == 0,
        num_warps=warps,
        num_stages=stages,
    )
    return out


def _contiguous(*tensors: Tensor | None) -> bool:
    return all(t is None or t.is_contiguous() for t in tensors)


def _supports_w8a8(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    x_scale: Tensor | None,
    quant_bias: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> bool:
    return (
        x.dtype == weight.dtype == torch.int8
        and scale.dtype == torch.float32
        and (x_scale is None or x_scale.dtype == torch.float32)
        and dtype in FLOATS
        and usable(x)
        and usable(weight)
        and _contiguous(weight, scale, x_scale, quant_bias, bias)
    )


@int8_linear.linear_w8a8.implement("triton", supports=_supports_w8a8)
def linear_w8a8_triton(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    x_scale: Tensor | None,
    quant_bias: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Run linear_w8a8; see the reference."""
    return _launch(x, weight, scale, x_scale, quant_bias, bias, dtype)


def _supports_w8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> bool:
    return (
        usable_float(x)
        and weight.dtype == torch.int8
        and scale.dtype == torch.float32
        and usable(weight)
        and _contiguous(weight, scale, bias)
    )


@int8_linear.linear_w8.implement("triton", supports=_supports_w8)
def linear_w8_triton(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Run linear_w8; see the reference."""
    return _launch(x, weight, scale, None, None, bias, x.dtype)
