"""Finds what other people's models write out in torch, and makes named ops of it.

The graphs come from `torch.compile` on a foreign model: RMSNorm, SwiGLU and linear layers as ATen calls.
Rotary embedding has a file of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import piecework.ops  # noqa: F401  registers the named ops
from piecework.graph.passes.base import Match
from piecework.graph.passes.bounds import tolerance
from piecework.graph.passes.rewrite import PatternPass

_ops = torch.ops.piecework


def _mean_square(h: Any, by_power: bool) -> Any:
    return (h.pow(2) if by_power else h * h).mean(-1, keepdim=True)


def _normed(h: Any, eps: Any, by_power: bool, by_rsqrt: bool) -> Any:
    under = _mean_square(h, by_power) + eps
    return h * torch.rsqrt(under) if by_rsqrt else h / torch.sqrt(under)


def _norm_spelling(by_power: bool, by_rsqrt: bool, cast: bool) -> Callable[..., Any]:
    def plain(x: Tensor, weight: Tensor, eps: float) -> Any:
        return weight * _normed(x, eps, by_power, by_rsqrt)

    def through_float(x: Tensor, weight: Tensor, eps: float, dtype: Any) -> Any:
        return weight * _normed(x.to(torch.float32), eps, by_power, by_rsqrt).to(dtype)

    return through_float if cast else plain


def _torch_norm(x: Tensor, weight: Tensor, eps: float, size: int) -> Any:
    return torch.ops.aten.rms_norm(x, [size], weight, eps)


def raise_rms_norm() -> PatternPass:
    """RMSNorm as transformers, Llama and torch.nn write it -> `piecework::rms_norm`.

    A model in 16 bits must normalise in float32 and round before the weight, as the named op does; the
    one that torch.nn.RMSNorm stands for rounds once more there, which is in the declared bound.
    """

    def replacement(x: Tensor, weight: Tensor, eps: float, dtype: Any = None, size: int = 0) -> Any:
        return _ops.rms_norm(x, weight, eps)

    def where(match: Match) -> bool:
        x, weight = match.value("x"), match.value("weight")
        fits = weight.ndim == 1 and weight.shape[0] == x.shape[-1] and match.same_dtype("x", "weight")
        cast = match.bound.get("dtype")
        through_float = cast is not None or "size" in match.bound
        return fits and (cast in (None, x.dtype)) and (through_float or x.dtype is torch.float32)

    flags = (True, False)
    spellings = [_norm_spelling(p, r, c) for c in flags for p in flags for r in flags]
    return PatternPass(
        name="raise_rms_norm",
        pattern=[*spellings, _torch_norm],
        replacement=replacement,
        where=where,
        bound=tolerance(),
    )


def raise_silu_and_mul() -> PatternPass:
    """silu(gate) * up -> `piecework::silu_and_mul`, of one tensor if gate and up are its two halves.

    Not bitwise: torch's silu rounds differently in a vector loop than in what is left over, and where that
    begins depends on how the memory lies.
    """

    def halves(both: Tensor, size: int) -> Any:
        gate, up = both.split([size, size], -1)
        return torch.nn.functional.silu(gate) * up

    def apart(gate: Tensor, up: Tensor) -> Any:
        return torch.nn.functional.silu(gate) * up

    def replacement(
        gate: Tensor | None = None, up: Tensor | None = None, both: Tensor | None = None, size: int = 0
    ) -> Any:
        if both is None:
            assert gate is not None and up is not None
            both = torch.cat([gate, up], -1)
        return _ops.silu_and_mul(both)

    def where(match: Match) -> bool:
        if "both" in match.bound:
            return True
        return match.same_dtype("gate", "up") and match.same_shape("gate", "up")

    return PatternPass(
        name="raise_silu_and_mul",
        pattern=[halves, apart],
        replacement=replacement,
        where=where,
        bound=tolerance(),
    )


def raise_linear() -> PatternPass:
    """torch.nn.functional.linear -> `piecework::linear`, whose kernel may add up in another order."""

    def pattern(x: Tensor, weight: Tensor, bias: Any) -> Any:
        return torch.ops.aten.linear(x, weight, bias)

    def replacement(x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        return _ops.linear(x, weight, bias)

    def where(match: Match) -> bool:
        return match.value("weight").ndim == 2 and match.same_dtype("x", "weight")

    return PatternPass(
        name="raise_linear", pattern=pattern, replacement=replacement, where=where, bound=tolerance()
    )
