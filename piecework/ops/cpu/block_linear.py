"""`linear_blocks` on the CPU."""

from __future__ import annotations

import ctypes

from torch import Tensor

from piecework.native import library
from piecework.native.types import TYPES
from piecework.ops.block_linear import BLOCK, linear_blocks
from piecework.ops.cpu.kernels import FLOATS, kernels

_POINTERS = ("x", "packed", "bias", "out")
_NUMBERS = ("x_stride", "rows", "outputs", "inputs", "kind", "type")


class _Call(ctypes.Structure):
    """`BlockLinearCall` of native/src/block_dot.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _NUMBERS),
    )


def supports(x: Tensor, packed: Tensor, outputs: int, bias: Tensor | None = None) -> bool:
    """Whether the kernel can run the call."""
    return (
        x.dtype in FLOATS
        and packed.is_contiguous()
        and (bias is None or bias.dtype == x.dtype)
        and library() is not None
    )


@linear_blocks.implement("cpu", supports)
def linear_blocks_cpu(x: Tensor, packed: Tensor, outputs: int, bias: Tensor | None = None) -> Tensor:
    """x [..., K] -> [..., N]; see the reference. A row gives the same whatever rows are beside it."""
    inputs = packed.shape[1] * BLOCK
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, inputs).contiguous()
    out = x.new_empty((*x.shape[:-1], outputs))
    if bias is not None:
        bias = bias.contiguous()
    call = _Call(
        rows.data_ptr(),
        packed.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows.stride(0),
        rows.shape[0],
        outputs,
        inputs,
        packed.shape[2],
        TYPES[x.dtype],
    )
    kernels().piecework_linear_blocks(ctypes.byref(call))
    return out
