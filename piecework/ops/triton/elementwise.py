"""silu_and_mul, the quantisations, and both in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from piecework.ops import fused_gate, quantize
from piecework.ops.activation import silu_and_mul
from piecework.ops.triton.available import usable_float
from piecework.ops.triton.rows import MAX_WIDTH, power_of_two, rows_of, rows_per_program

_TILE = 1024


def _launch(
    x: Tensor,
    out: Tensor,
    *,
    gated: bool,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    row_scales: Tensor | None = None,
) -> None:
    from piecework.ops.triton.kernels.common import warps_for
    from piecework.ops.triton.kernels.elementwise import elementwise_kernel

    if out.numel() == 0:
        return
    rows = rows_of(x)
    width = out.shape[-1]
    block = power_of_two(width)
    if row_scales is None:
        block = min(block, _TILE)
    height = rows_per_program(block)
    elementwise_kernel[(-(-rows.count // height), -(-width // block))](
        rows.tensor,
        out,
        scale,
        offset,
        row_scales,
        rows.count,
        rows.outer,
        rows.step,
        INNER=rows.inner,
        WIDTH=width,
        ROWS=height,
        BLOCK=block,
        GATED=gated,
        num_warps=warps_for(height * block),
    )


def _half(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=dtype, device=x.device)


def _scales(x: Tensor) -> Tensor:
    return torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)


def _supports(x: Tensor, *rest: object) -> bool:
    return usable_float(x)


def _supports_gate(x: Tensor, *rest: object) -> bool:
    return usable_float(x) and x.shape[-1] % 2 == 0


@silu_and_mul.implement("triton", supports=_supports_gate)
def silu_and_mul_triton(x: Tensor) -> Tensor:
    """Run silu_and_mul; see the reference."""
    out = _half(x, x.dtype)
    _launch(x, out, gated=True)
    return out


@fused_gate.silu_mul_quant.implement("triton", supports=_supports_gate)
def silu_mul_quant_triton(
    x: Tensor, scale: Tensor, reciprocal: Tensor, offset: Tensor | None = None
) -> Tensor:
    """Run silu_mul_quant; see the reference."""
    out = _half(x, torch.int8)
    _launch(x, out, gated=True, scale=scale, offset=offset)
    return out


@fused_gate.silu_mul_dynamic_quant.implement(
    "triton", supports=lambda x: _supports_gate(x) and x.shape[-1] // 2 <= 2 * MAX_WIDTH
)
def silu_mul_dynamic_quant_triton(x: Tensor) -> tuple[Tensor, Tensor]:
    """Run silu_mul_dynamic_quant; see the reference."""
    out, scales = _half(x, torch.int8), _scales(x)
    _launch(x, out, gated=True, row_scales=scales)
    return out, scales


@quantize.quantize.implement("triton", supports=_supports)
def quantize_triton(x: Tensor, scale: Tensor, reciprocal: Tensor, offset: Tensor | None = None) -> Tensor:
    """Run quantize; see the reference."""
    out = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    _launch(x, out, gated=False, scale=scale, offset=offset)
    return out


@quantize.dynamic_quantize.implement(
    "triton", supports=lambda x: usable_float(x) and x.shape[-1] <= 2 * MAX_WIDTH
)
def dynamic_quantize_triton(x: Tensor) -> tuple[Tensor, Tensor]:
    """Run dynamic_quantize; see the reference."""
    out, scales = torch.empty(x.shape, dtype=torch.int8, device=x.device), _scales(x)
    _launch(x, out, gated=False, row_scales=scales)
    return out, scales
