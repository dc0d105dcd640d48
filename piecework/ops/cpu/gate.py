"""`silu_and_mul`, its fusions, and quantisation on the CPU, by the library's kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from piecework.native.types import TYPES
from piecework.ops import fused_gate
from piecework.ops.activation import silu_and_mul
from piecework.ops.cpu.kernels import Kernel, address, row_stride, row_strided
from piecework.ops.quantize import dynamic_quantize, quantize

_int8 = torch.int8
_silu_and_mul = Kernel("silu_and_mul", "x out scale offset row_scale", "rows size stride type")
_quantize = Kernel("quantize", "x out scale offset row_scale", "rows size stride type")


def _supports_gate(x: Tensor) -> bool:
    return row_strided(x) and x.shape[-1] % 2 == 0


# Not inline: written out, its exponentials run on one thread, and a program of 32 rows took 8% longer.
@silu_and_mul.implement("cpu", supports=_supports_gate)
def silu_and_mul_cpu(x: Tensor) -> Tensor:
    """See the reference, here as for the others of this file."""
    *shape, size = x.shape
    half = size // 2
    out = x.new_empty((*shape, half))
    _silu_and_mul(
        x.data_ptr(), out.data_ptr(), 0, 0, 0, x.numel() // size, half, row_stride(x), TYPES[x.dtype]
    )
    return out


def _supports_gate_quant(x: Tensor, scale: Tensor, reciprocal: Tensor, offset: Tensor | None = None) -> bool:
    return _supports_gate(x)


@fused_gate.silu_mul_quant.implement("cpu", supports=_supports_gate_quant)
def silu_mul_quant_cpu(x: Tensor, scale: Tensor, reciprocal: Tensor, offset: Tensor | None = None) -> Tensor:
    """Divides by the scale, as the reference does."""
    *shape, size = x.shape
    half = size // 2
    out = torch.empty((*shape, half), dtype=_int8)
    _silu_and_mul(
        x.data_ptr(),
        out.data_ptr(),
        scale.data_ptr(),
        address(offset),
        0,
        x.numel() // size,
        half,
        row_stride(x),
        TYPES[x.dtype],
    )
    return out


@fused_gate.silu_mul_dynamic_quant.implement("cpu", supports=_supports_gate)
def silu_mul_dynamic_quant_cpu(x: Tensor) -> tuple[Tensor, Tensor]:
    """The gated row stays in the core's cache until it is quantised."""
    *shape, size = x.shape
    half = size // 2
    out = torch.empty((*shape, half), dtype=_int8)
    scale = torch.empty((*shape, 1))
    _silu_and_mul(
        x.data_ptr(),
        out.data_ptr(),
        0,
        0,
        scale.data_ptr(),
        x.numel() // size,
        half,
        row_stride(x),
        TYPES[x.dtype],
    )
    return out, scale


def _supports_quantize(x: Tensor, scale: Tensor, reciprocal: Tensor, offset: Tensor | None = None) -> bool:
    return row_strided(x)


@quantize.implement("cpu", supports=_supports_quantize, inline=True)
def quantize_cpu(x: Tensor, scale: Tensor, reciprocal: Tensor, offset: Tensor | None = None) -> Tensor:
    """Divides by the scale, as the reference does."""
    size = x.shape[-1]
    out = torch.empty_like(x, dtype=_int8)
    _quantize(
        x.data_ptr(),
        out.data_ptr(),
        scale.data_ptr(),
        address(offset),
        0,
        x.numel() // size,
        size,
        row_stride(x),
        TYPES[x.dtype],
    )
    return out


@dynamic_quantize.implement("cpu", supports=row_strided, inline=True)
def dynamic_quantize_cpu(x: Tensor) -> tuple[Tensor, Tensor]:
    """One scale per row."""
    *shape, size = x.shape
    out = torch.empty_like(x, dtype=_int8)
    scale = torch.empty((*shape, 1))
    _quantize(
        x.data_ptr(),
        out.data_ptr(),
        0,
        0,
        scale.data_ptr(),
        x.numel() // size,
        size,
        row_stride(x),
        TYPES[x.dtype],
    )
    return out, scale
