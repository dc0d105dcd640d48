"""The kernels of piecework/native as functions, and what they ask of tensors."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from piecework.native import library

FLOATS = (torch.float32, torch.bfloat16, torch.float16)

KERNELS: dict[str, Kernel] = {}
"""All kernels that were declared, by name."""


class Kernel:
    """`piecework_<name>` of the library, called with the fields of its one argument, a struct, in order.

    Every field has 8 bytes: pointers first (0 for what isn't there), then int64s, then doubles. So whoever
    has the fields as numbers can make the call, and whoever finds something else in the place of the first
    pointer, as while a piece is written down (piecework/compile/record.py), is asked to take it over.
    """

    def __init__(self, name: str, pointers: str, numbers: str, floats: str = "") -> None:
        self.name = name
        self.pointers = tuple(pointers.split())
        self.numbers = tuple(numbers.split())
        self.floats = tuple(floats.split())
        self.fields = (*self.pointers, *self.numbers, *self.floats)
        whole = len(self.pointers) + len(self.numbers)
        self._pack = struct.Struct(f"{whole}q{len(self.floats)}d").pack
        KERNELS[name] = self

    @functools.cached_property
    def function(self) -> Callable[[bytes], None]:
        """The function in the library; a `supports` has seen that it is there."""
        found = library()
        assert found is not None
        function = found[f"piecework_{self.name}"]
        function.argtypes = [ctypes.c_char_p]
        function.restype = None
        return function

    def __call__(self, *fields: Any) -> None:
        """Run on these values of its fields."""
        first = fields[0]
        if type(first) is int:
            self.function(self._pack(*fields))
        else:
            first.record(self, fields)


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


def address(x: Tensor | None) -> int:
    """Where the data of a tensor begins, 0 if it is not there."""
    return 0 if x is None else x.data_ptr()
