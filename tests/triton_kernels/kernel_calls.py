"""Calls of the ops that have Triton kernels, and their comparison with the references."""

from __future__ import annotations

import torch
from torch import Tensor

import piecework.ops as ops

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# Relative size of a step in the last place; results may be a step or two apart.
STEP = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}

NORMS = (
    "rms_norm",
    "add_rms_norm",
    "rms_norm_quant",
    "rms_norm_dynamic_quant",
    "add_rms_norm_quant",
    "add_rms_norm_dynamic_quant",
)
ROWWISE = (*NORMS, "silu_and_mul", "silu_mul_quant", "silu_mul_dynamic_quant", "quantize", "dynamic_quantize")


def rowwise(name: str, tokens: int, hidden: int, dtype: torch.dtype, offset: bool = False) -> tuple:
    """Arguments on the CPU for an op that works row by row and gives [tokens, hidden]."""
    generator = torch.Generator().manual_seed(tokens * 7919 + hidden)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    scale = torch.tensor([0.021])
    static = (scale, 1 / scale, torch.tensor([3.0]) if offset else None)
    weight = 1 + random(hidden) / 8
    one, two = random(tokens, hidden), random(tokens, hidden)
    plain = {
        "rms_norm": (one, weight, 1e-6),
        "add_rms_norm": (one, two, weight, 1e-5),
        "silu": (random(tokens, 2 * hidden),),
        "quantize": (one,),
    }
    stem = {"dynamic_quantize": "quantize", "silu_and_mul": "silu"}.get(
        name, name.removesuffix("_quant").removesuffix("_dynamic").removesuffix("_mul")
    )
    is_static = name == "quantize" or (name.endswith("_quant") and "dynamic" not in name)
    return (*plain[stem], *(static if is_static else ()))


def to(value: object, device: torch.device) -> object:
    """Move a tensor to the device, keeping its strides; leave anything else."""
    if not isinstance(value, Tensor) or value.device == device:
        return value
    moved = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return moved.copy_(value)


def compare(name: str, args: tuple, device: torch.device) -> None:
    """Run the op's Triton implementation and its reference, both on the device, and compare."""
    op = ops.get(name)
    there = tuple(to(a, device) for a in args)
    chosen = op.resolve(("triton", "reference"), *there)
    assert chosen.name == "triton"
    got, expected = chosen.run(*there), op.reference(*there)
    if isinstance(got, Tensor):
        got, expected = (got,), (expected,)
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        same(one, other)


def same(got: Tensor, expected: Tensor) -> None:
    """Two steps in the last place apart at most; int8 by one, in one element of a hundred."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    if got.dtype == torch.int8:
        apart = (got.int() - expected.int()).abs()
        assert apart.max() <= 1 and (apart > 0).float().mean() <= 0.01
        return
    step = STEP[got.dtype]
    torch.testing.assert_close(got, expected, rtol=2 * step, atol=step)
