"""Which calls the Triton kernels take."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@cache
def installed() -> bool:
    """Say whether triton can be imported, without importing it."""
    return find_spec("triton") is not None


def usable(x: Tensor) -> bool:
    """Say whether kernels run on x: on CUDA, or anywhere under the interpreter (TRITON_INTERPRET=1)."""
    return installed() and (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1")


def usable_float(x: Tensor, *others: Tensor | None) -> bool:
    """`usable`, x is float32, float16 or bfloat16, and so are the others."""
    if x.dtype not in FLOATS or not usable(x):
        return False
    return all(other is None or other.dtype == x.dtype for other in others)
