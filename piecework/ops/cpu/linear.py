"""`linear` on the CPU: the library's kernel over weights as they lie, and torch where that can't run."""

from __future__ import annotations

import ctypes

from torch import Tensor

from piecework.native import library
from piecework.native.types import TYPES
from piecework.ops.cpu.kernels import FLOATS, kernels
from piecework.ops.linear import linear


class _Call(ctypes.Structure):
    """`LinearCall` of native/src/linear.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "out")),
        *(
            (name, ctypes.c_int64)
            for name in ("x_stride", "weight_stride", "rows", "outputs", "inputs", "type")
        ),
    )


def supports(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether the kernel can run the call: one float type for all, each row without gaps."""
    kind = weight.dtype
    return (
        kind in FLOATS
        and x.dtype == kind
        and weight.stride(1) == 1
        and (bias is None or bias.dtype == kind)
        and library() is not None
    )


@linear.implement("cpu", supports)
def linear_cpu(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K], weight [N, K], bias [N] -> [..., N]. A row gives the same whatever rows are beside it."""
    outputs, inputs = weight.shape
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, inputs).contiguous()
    out = x.new_empty((*x.shape[:-1], outputs))
    if bias is not None:
        bias = bias.contiguous()
    call = _Call(
        rows.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows.stride(0),
        weight.stride(0),
        rows.shape[0],
        outputs,
        inputs,
        TYPES[weight.dtype],
    )
    kernels().piecework_linear(ctypes.byref(call))
    return out
