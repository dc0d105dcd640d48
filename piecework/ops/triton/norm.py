"""The ops around rms_norm, each as one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from piecework.ops import fused_norm
from piecework.ops.norm import rms_norm
from piecework.ops.triton.available import FLOATS, usable, usable_float
from piecework.ops.triton.rows import MAX_WIDTH, power_of_two, rows_of, rows_per_program


def _launch(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    *,
    residual: Tensor | None = None,
    total: Tensor | None = None,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    row_scales: Tensor | None = None,
) -> None:
    from piecework.ops.triton.kernels.common import warps_for
    from piecework.ops.triton.kernels.norm import norm_kernel

    if x.numel() == 0:
        return
    rows = rows_of(x)
    other = rows if residual is None else rows_of(residual)
    if other.inner != rows.inner:
        rows, other = rows_of(x.contiguous()), rows_of(other.tensor.contiguous())
    block = power_of_two(x.shape[-1])
    height = rows_per_program(block)
    norm_kernel[(-(-rows.count // height),)](
        rows.tensor,
        None if residual is None else other.tensor,
        weight,
        out,
        total,
        scale,
        offset,
        row_scales,
        rows.count,
        eps,
        rows.outer,
        rows.step,
        other.outer,
        other.step,
        INNER=rows.inner,
        HIDDEN=x.shape[-1],
        ROWS=height,
        BLOCK=block,
        num_warps=warps_for(height * block),
    )


def _like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)


def _scales(x: Tensor) -> Tensor:
    return torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)


def _supports_norm(x: Tensor, weight: Tensor, eps: float) -> bool:
    return usable_float(x) and weight.dtype in FLOATS and _fits(x, weight)


def _supports(x: Tensor, weight: Tensor, *rest: object) -> bool:
    return usable_float(x, weight) and _fits(x, weight)


def _supports_add(x: Tensor, residual: Tensor, weight: Tensor, *rest: object) -> bool:
    return usable_float(x, residual, weight) and _fits(x, weight) and x.dim() == residual.dim()


def _fits(x: Tensor, weight: Tensor) -> bool:
    return x.shape[-1] <= MAX_WIDTH and weight.is_contiguous() and usable(weight)


@rms_norm.implement("triton", supports=_supports_norm)
def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Run rms_norm; see the reference."""
    out = _like(x, torch.promote_types(x.dtype, weight.dtype))
    _launch(x, weight, eps, out)
    return out


@fused_norm.add_rms_norm.implement("triton", supports=_supports_add)
def add_rms_norm_triton(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Run add_rms_norm; see the reference."""
    out, total = _like(x), _like(x)
    _launch(x, weight, eps, out, residual=residual, total=total)
    return out, total


@fused_norm.rms_norm_quant.implement("triton", supports=_supports)
def rms_norm_quant_triton(
    x: Tensor, weight: Tensor, eps: float, scale: Tensor, reciprocal: Tensor, offset: Tensor | None = None
) -> Tensor:
    """Run rms_norm_quant; see the reference."""
    out = _like(x, torch.int8)
    _launch(x, weight, eps, out, scale=scale, offset=offset)
    return out


@fused_norm.rms_norm_dynamic_quant.implement("triton", supports=_supports)
def rms_norm_dynamic_quant_triton(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Run rms_norm_dynamic_quant; see the reference."""
    out, scales = _like(x, torch.int8), _scales(x)
    _launch(x, weight, eps, out, row_scales=scales)
    return out, scales


@fused_norm.add_rms_norm_quant.implement("triton", supports=_supports_add)
def add_rms_norm_quant_triton(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    scale: Tensor,
    reciprocal: Tensor,
    offset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run add_rms_norm_quant; see the reference."""
    out, total = _like(x, torch.int8), _like(x)
    _launch(x, weight, eps, out, residual=residual, total=total, scale=scale, offset=offset)
    return out, total


@fused_norm.add_rms_norm_dynamic_quant.implement("triton", supports=_supports_add)
def add_rms_norm_dynamic_quant_triton(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Run add_rms_norm_dynamic_quant; see the reference."""
    out, total, scales = _like(x, torch.int8), _like(x), _scales(x)
    _launch(x, weight, eps, out, residual=residual, total=total, row_scales=scales)
    return out, total, scales
