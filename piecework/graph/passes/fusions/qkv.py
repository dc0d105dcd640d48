"""What stands between the packed projection and attention as one op: cut, per-head norms, rotary.

It gives queries and keys; values stay a view of the projection, since a copy would only cost time.

Not bitwise by declaration: with the ops' references the bits are the same, but a kernel may contract
products and sums where the single ops' kernels round between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from typing import Any

import torch
from torch import Tensor

from piecework.graph.passes.base import EACH_LAYER, Match
from piecework.graph.passes.bounds import tolerance
from piecework.graph.passes.rewrite import PatternPass
from piecework.graph.passes.views import viewable

_ops = torch.ops.piecework


def _heads_fit(match: Match) -> bool:
    """The parts are whole heads of one size, and the projection's rows can be seen as heads."""
    qkv, size = match.value("qkv"), match["size"]
    heads, kv_heads = match["heads"], match["kv_heads"]
    if not qkv.dtype.is_floating_point or qkv.dim() != 2:
        return False
    whole = match["q_size"] == heads * size and match["kv_size"] == kv_heads * size
    return whole and viewable(qkv, [-1, heads + 2 * kv_heads, size])


def _gammas_fit(match: Match) -> bool:
    """Norms and their biases are [D] and of the projection's dtype."""
    names = [n for n in ("q_weight", "k_weight", "q_bias", "k_bias") if n in match.bound]
    sized = all(tuple(match.value(name).shape) == (match["size"],) for name in names)
    return sized and match.same_dtype("qkv", *names)


def _values(qkv: Tensor, heads: int, kv_heads: int, size: int) -> Tensor:
    """The last heads of the projection, as a view [T, kv_heads, size]."""
    return qkv.view(-1, heads + 2 * kv_heads, size)[:, heads + kv_heads :]


def split_qkv_rope() -> PatternPass:
    """split, views as heads, rotary -> `split_qkv_rope`, values as a view: models without norms of heads."""

    def pattern(
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        q_size: int,
        kv_size: int,
        heads: int,
        kv_heads: int,
        size: int,
        interleaved: bool,
    ) -> Any:
        q, k, v = qkv.split([q_size, kv_size, kv_size], -1)
        q, k = _ops.rotary(
            positions, q.view(-1, heads, size), k.view(-1, kv_heads, size), cos_sin, interleaved
        )
        return q, k, v.view(-1, kv_heads, size)

    def replacement(
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        heads: int,
        kv_heads: int,
        size: int,
        interleaved: bool,
        **sizes: int,
    ) -> Any:
        q, k = _ops.split_qkv_rope(qkv, positions, cos_sin, heads, kv_heads, interleaved)
        return q, k, _values(qkv, heads, kv_heads, size)

    return PatternPass(
        name="split_qkv_rope",
        pattern=pattern,
        replacement=replacement,
        where=_heads_fit,
        bound=tolerance(),
        expect=EACH_LAYER,
    )


def split_qkv_rmsnorm_rope() -> PatternPass:
    """split, views as heads, a norm of queries and one of keys, rotary -> `split_qkv_rmsnorm_rope`.

    Either norm may have a bias behind it.
    """

    def replacement(
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        eps: float,
        heads: int,
        kv_heads: int,
        size: int,
        interleaved: bool,
        q_bias: Tensor | None = None,
        k_bias: Tensor | None = None,
        **sizes: int,
    ) -> Any:
        q, k = _ops.split_qkv_rmsnorm_rope(
            qkv, positions, cos_sin, q_weight, k_weight, eps, heads, kv_heads, q_bias, k_bias, interleaved
        )
        return q, k, _values(qkv, heads, kv_heads, size)

    return PatternPass(
        name="split_qkv_rmsnorm_rope",
        pattern=[_normed(biases) for biases in (("q_bias", "k_bias"), ("q_bias",), ("k_bias",), ())],
        replacement=replacement,
        where=lambda match: _heads_fit(match) and _gammas_fit(match),
        bound=tolerance(),
        expect=EACH_LAYER,
    )


_NORMED = {
    **dict.fromkeys(("qkv", "positions", "cos_sin", "q_weight", "k_weight"), Tensor),
    "eps": float,
    **dict.fromkeys(("q_size", "kv_size", "heads", "kv_heads", "size"), int),
    "interleaved": bool,
}


def _normed(biases: Sequence[str]) -> Callable[..., Any]:
    """The pattern with these biases; its parameters are all in it and no others."""

    def pattern(**p: Any) -> Any:
        q, k, v = p["qkv"].split([p["q_size"], p["kv_size"], p["kv_size"]], -1)
        q = _ops.rms_norm(q.view(-1, p["heads"], p["size"]), p["q_weight"], p["eps"])
        k = _ops.rms_norm(k.view(-1, p["kv_heads"], p["size"]), p["k_weight"], p["eps"])
        q = q + p["q_bias"] if "q_bias" in p else q
        k = k + p["k_bias"] if "k_bias" in p else k
        q, k = _ops.rotary(p["positions"], q, k, p["cos_sin"], p["interleaved"])
        return q, k, v.view(-1, p["kv_heads"], p["size"])

    kinds = _NORMED | dict.fromkeys(biases, Tensor)
    found = [Parameter(name, Parameter.KEYWORD_ONLY, annotation=kind) for name, kind in kinds.items()]
    pattern.__signature__ = Signature(found)  # type: ignore[attr-defined]
    return pattern
