"""Calls of the ops over rows, and how closely a kernel has to follow the reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from piecework import ops

NORMS = ("rms_norm", "rms_norm_quant", "rms_norm_dynamic_quant")
ADDS = ("add_rms_norm", "add_rms_norm_quant", "add_rms_norm_dynamic_quant")
GATES = ("silu_and_mul", "silu_mul_quant", "silu_mul_dynamic_quant")
QUANTISERS = ("quantize", "dynamic_quantize")
HEADS = ("rotary", "split_qkv_rope", "split_qkv_rmsnorm_rope")
ROW_OPS = (*NORMS, *ADDS, *GATES, *QUANTISERS)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def row_case(name: str, tokens: int, size: int, dtype: torch.dtype, offset: bool = True) -> tuple[Any, ...]:
    """Arguments of a call with [tokens, size] inputs ([tokens, 2 size] for a gate)."""
    torch.manual_seed(tokens * 10007 + size)
    x = torch.randn(tokens, size * (2 if name in GATES else 1)).to(dtype)
    weight = (torch.rand(size) + 0.5).to(dtype)
    static = (torch.tensor([0.03]), torch.tensor([1 / 0.03]), torch.tensor([5.0]) if offset else None)
    args: tuple[Any, ...] = (x,)
    if name in ADDS:
        args += (torch.randn(tokens, size).to(dtype),)
    if name in NORMS + ADDS:
        args += (weight, 1e-5)
    return args + (static if name.endswith("quantize") or name.endswith("_quant") else ())[: _static(name)]


def _static(name: str) -> int:
    return 0 if "dynamic" in name else 3


def check(name: str, args: tuple[Any, ...]) -> None:
    """The CPU's kernel must support the call and give what the reference gives."""
    op = ops.get(name)
    implementation = op.implementations["cpu"]
    assert implementation.supports is not None and implementation.supports(*args), name
    got, wanted = implementation.run(*args), op.reference(*args)
    if isinstance(got, Tensor):
        got, wanted = (got,), (wanted,)
    for g, w in zip(got, wanted, strict=True):
        assert g.shape == w.shape and g.dtype == w.dtype and g.is_contiguous()
        compare(g, w, args[1 if name == "rotary" else 0].dtype, turned=name == "split_qkv_rmsnorm_rope")


def compare(got: Tensor, wanted: Tensor, dtype: torch.dtype, turned: bool = False) -> None:
    """int8 may differ by one, float32 by 1e-5, 16-bit floats by two last places, and that seldom.

    Two: a number that is rounded to its neighbour before the product with a weight, which is rounded too.
    """
    if got.dtype == torch.int8:
        far = (got.int() - wanted.int()).abs()
        assert not (far > 1).any()
        # Where a 16-bit scale falls on another side of a tie, its whole row may be off by one.
        assert dtype != torch.float32 or far.sum() <= 1 + far.numel() / 500
        return
    bound = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}[dtype]
    if got.dtype == dtype != torch.float32:
        assert ((got != wanted) & wanted.isfinite()).sum() <= 3 + got.numel() / 50
    # A number that was rounded to its neighbour before it was rotated with another, of up to 4 or so.
    floor = bound / 4 if dtype == torch.float32 else bound * 4
    torch.testing.assert_close(got, wanted, rtol=bound, atol=floor if turned else bound / 4, equal_nan=True)
