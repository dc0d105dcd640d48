"""The kernels of piecework/native as functions with declared arguments, and what they ask of tensors."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from piecework.native import library

FLOATS = (torch.float32, torch.bfloat16, torch.float16)

_LETTERS = {"i": ctypes.c_int32, "n": ctypes.c_int64, "f": ctypes.c_float, "p": ctypes.c_void_p}
_SIGNATURES = {
    "rms_norm": "ippfp nnnnn",
    "rms_norm_quant": "ippfppp nn",
    "rms_norm_dynamic_quant": "ippfpp nn",
    "add_rms_norm": "ipppfpp nn",
    "add_rms_norm_quant": "ipppfpppp nn",
    "add_rms_norm_dynamic_quant": "ipppfppp nn",
    "silu_and_mul": "ipp nnn",
    "silu_mul_quant": "ipppp nnn",
    "silu_mul_dynamic_quant": "ippp nnn",
    "quantize": "ipppp nnn",
    "dynamic_quantize": "ippp nnn",
    "rotary": "ippppipp nnnnnnnnn",
    "split_qkv_rope": "ipnppni nnnn ppp ppppf",
    "linear_w8a8": "ippppppp nnnn",
    "linear_w8": "ippppp nnnn",
}


@functools.cache
def kernels() -> ctypes.CDLL:
    """Return the library with its functions' arguments declared; a `supports` has seen that it is there."""
    found = library()
    assert found is not None
    for name, letters in _SIGNATURES.items():
        function = getattr(found, f"piecework_{name}")
        function.argtypes = [_LETTERS[letter] for letter in letters.replace(" ", "")]
        function.restype = None
    return found


def row_strided(x: Tensor) -> bool:
    """Whether x [..., K] has a float type that kernels know, whole rows, and one step between them."""
    return (
        x.dtype in FLOATS
        and x.dim() > 0
        and x.stride(-1) == 1
        and (x.dim() <= 2 or x.is_contiguous())
        and library() is not None
    )


def heads_strided(x: Tensor) -> bool:
    """The same of heads x [T, N, D], with a step between tokens and a lesser one between heads."""
    return (
        x.dtype in FLOATS
        and x.dim() == 3
        and x.stride(2) == 1
        and x.stride(1) * x.shape[1] <= x.stride(0)
        and library() is not None
    )


def contiguous(*tensors: Tensor | None) -> bool:
    """Whether those of the tensors that are there have no gaps."""
    return all(x is None or x.is_contiguous() for x in tensors)


def row_stride(x: Tensor) -> int:
    """Elements from one row of x [..., K] to the next."""
    return x.stride(-2) if x.dim() > 1 else 0


def address(x: Tensor | None) -> int | None:
    """Where the data of a tensor that may not be there begins."""
    return None if x is None else x.data_ptr()
