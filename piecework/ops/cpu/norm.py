"""`rms_norm` and its fusions on the CPU: one pass of the library's kernel over each row."""

from __future__ import annotations

import torch
from torch import Tensor

from piecework.native.types import TYPES
from piecework.ops import fused_norm
from piecework.ops.cpu.kernels import Kernel, address, contiguous, heads_strided, row_strided
from piecework.ops.norm import rms_norm

_int8 = torch.int8
_empty_like = torch.empty_like
_rms_norm = Kernel(
    "rms_norm",
    "x residual weight total out scale offset row_scale",
    "rows size inner outer step type",
    "eps",
)


def _supports_rms_norm(x: Tensor, weight: Tensor, eps: float) -> bool:
    """x may be heads [T, N, D] that are cut from longer rows."""
    if weight.dtype != x.dtype or not contiguous(weight):
        return False
    return heads_strided(x) or row_strided(x)


@rms_norm.implement("cpu", supports=_supports_rms_norm, inline=True)
def rms_norm_cpu(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See the reference, here as for the others of this file."""
    size = x.shape[-1]
    out = _empty_like(x)
    inner, outer, step = 1, size, size
    if x.dim() == 3:
        inner = x.shape[1]
        outer, step, _ = x.stride()
    elif x.dim() == 2:
        outer = x.stride(0)
    _rms_norm(
        x.data_ptr(),
        0,
        weight.data_ptr(),
        0,
        out.data_ptr(),
        0,
        0,
        0,
        x.numel() // size,
        size,
        inner,
        outer,
        step,
        TYPES[x.dtype],
        eps,
    )
    return out


def _supports_norm(x: Tensor, weight: Tensor) -> bool:
    return weight.dtype == x.dtype and contiguous(x, weight) and row_strided(x)


def _norm_rows(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    total: Tensor | None,
    out: Tensor,
    scale: Tensor | None,
    offset: Tensor | None,
    row_scale: Tensor | None,
    eps: float,
) -> None:
    """Call the kernel on contiguous rows."""
    size = x.shape[-1]
    _rms_norm(
        x.data_ptr(),
        address(residual),
        weight.data_ptr(),
        address(total),
        out.data_ptr(),
        address(scale),
        address(offset),
        address(row_scale),
        x.numel() // size,
        size,
        1,
        size,
        0,
        TYPES[x.dtype],
        eps,
    )


def _supports_quant(
    x: Tensor, weight: Tensor, eps: float, scale: Tensor, reciprocal: Tensor, offset: Tensor | None = None
) -> bool:
    return _supports_norm(x, weight)


@fused_norm.rms_norm_quant.implement("cpu", supports=_supports_quant, inline=True)
def rms_norm_quant_cpu(
    x: Tensor, weight: Tensor, eps: float, scale: Tensor, reciprocal: Tensor, offset: Tensor | None = None
) -> Tensor:
    """Divides by the scale, as the reference does."""
    out = _empty_like(x, dtype=_int8)
    _norm_rows(x, None, weight, None, out, scale, offset, None, eps)
    return out


def _supports_dynamic(x: Tensor, weight: Tensor, eps: float) -> bool:
    return _supports_norm(x, weight)


@fused_norm.rms_norm_dynamic_quant.implement("cpu", supports=_supports_dynamic, inline=True)
def rms_norm_dynamic_quant_cpu(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The normed row stays in the core's cache until it is quantised."""
    out = _empty_like(x, dtype=_int8)
    scale = torch.empty((*x.shape[:-1], 1))
    _norm_rows(x, None, weight, None, out, None, None, scale, eps)
    return out, scale


def _supports_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> bool:
    if residual.dtype != x.dtype or not contiguous(residual) or residual.shape != x.shape:
        return False
    return _supports_norm(x, weight)


@fused_norm.add_rms_norm.implement("cpu", supports=_supports_add, inline=True)
def add_rms_norm_cpu(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum is rounded to x's dtype before the norm reads it."""
    out, total = _empty_like(x), _empty_like(x)
    _norm_rows(x, residual, weight, total, out, None, None, None, eps)
    return out, total


def _supports_add_quant(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    scale: Tensor,
    reciprocal: Tensor,
    offset: Tensor | None = None,
) -> bool:
    return _supports_add(x, residual, weight, eps)


@fused_norm.add_rms_norm_quant.implement("cpu", supports=_supports_add_quant, inline=True)
def add_rms_norm_quant_cpu(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    scale: Tensor,
    reciprocal: Tensor,
    offset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Divides by the scale, as the reference does."""
    out, total = _empty_like(x, dtype=_int8), _empty_like(x)
    _norm_rows(x, residual, weight, total, out, scale, offset, None, eps)
    return out, total


@fused_norm.add_rms_norm_dynamic_quant.implement("cpu", supports=_supports_add, inline=True)
def add_rms_norm_dynamic_quant_cpu(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The normed row stays in the core's cache until it is quantised."""
    out, total = _empty_like(x, dtype=_int8), _empty_like(x)
    scale = torch.empty((*x.shape[:-1], 1))
    _norm_rows(x, residual, weight, total, out, None, None, scale, eps)
    return out, total, scale
