"""Verification refuses a wrong version of each fusion, and by its name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_models import CASES, case_graph
from pass_graphs import OPS
from test_qkv_fusions import attend, graph
from torch.fx import GraphModule

from piecework.graph.passes import PassManager, PatternPass, VerificationError
from piecework.graph.passes.fusions import FUSIONS

Replacement = Callable[..., Any]


def in_order(*names: str) -> Callable[[Callable[..., Any]], Replacement]:
    """Make a replacement whose op gets the placeholders `names`; further ones are dropped."""

    def make(op: Callable[..., Any]) -> Replacement:
        return lambda **found: op(*(found[name] for name in names))

    return make


ADD = ("x", "residual", "weight", "eps")
STATIC = ("scale", "reciprocal")
HEADS = ("heads", "kv_heads")
QKV = ("qkv", "positions", "cos_sin")
NORMED = (*QKV, "q_weight", "k_weight", "eps", *HEADS)


def times_ten(op: Callable[..., Any], place: int) -> Callable[..., Any]:
    """The op with a number that is ten times as large."""
    return lambda *a: op(*a[:place], a[place] * 10, *a[place + 1 :])


def _sum_lost(x: Any, residual: Any, weight: Any, eps: Any) -> Any:
    return OPS.add_rms_norm(x, residual, weight, eps)[0], residual


def _norm_for_sum(x: Any, residual: Any, weight: Any, eps: Any) -> Any:
    y, _ = OPS.add_rms_norm(x, residual, weight, eps)
    return y, y * 1


def _scale_of_the_sum(x: Any, residual: Any, weight: Any, eps: Any) -> Any:
    q, total, _ = OPS.add_rms_norm_dynamic_quant(x, residual, weight, eps)
    return q, total, OPS.dynamic_quantize(total)[1]


def _halves_swapped(x: Any) -> Any:
    up, gate = x.chunk(2, -1)
    return OPS.silu_mul_dynamic_quant(torch.cat([gate, up], -1))


def _cut_static(x: Any, weight: Any, eps: Any, scale: Any, reciprocal: Any) -> Any:
    return (OPS.rms_norm(x, weight, eps) * reciprocal).clamp(-128, 127).to(torch.int8)


def _cut_dynamic(x: Any, weight: Any, eps: Any) -> Any:
    q, scale = OPS.rms_norm_dynamic_quant(x, weight, eps)
    return q - q.sign() * (q.abs() % 2), scale


def _with_values(op: Callable[..., Any]) -> Callable[..., Any]:
    """The op, and behind it the values that the right replacement gives: in `attend`, 2 heads of 8."""
    return lambda qkv, *rest: (*op(qkv, *rest), qkv[:, -16:].view(-1, 2, 8))


def _keys_for_values(qkv: Any, positions: Any, cos_sin: Any, heads: Any, kv_heads: Any) -> Any:
    q, k = OPS.split_qkv_rope(qkv, positions, cos_sin, heads, kv_heads)
    return q, k, k * 1


def _values_before_keys(qkv: Any, positions: Any, cos_sin: Any, heads: Any, kv_heads: Any) -> Any:
    q, k = OPS.split_qkv_rope(qkv, positions, cos_sin, heads, kv_heads)
    return q, k, qkv[:, -32:-16].view(-1, 2, 8)


def _swap_static(x: Any, weight: Any, eps: Any, scale: Any, reciprocal: Any) -> Any:
    return OPS.rms_norm_quant(x, weight, eps, reciprocal, scale)


WRONG: dict[str, tuple[str, Replacement]] = {
    "other eps, added": ("add_rms_norm", in_order(*ADD)(times_ten(OPS.add_rms_norm, 3))),
    "missing residual": ("add_rms_norm", in_order("x", "x", "weight", "eps")(OPS.add_rms_norm)),
    "sum lost": ("add_rms_norm", in_order(*ADD)(_sum_lost)),
    "norm for the sum's other users": ("add_rms_norm", in_order(*ADD)(_norm_for_sum)),
    "other eps, static": (
        "rms_norm_quant",
        in_order("x", "weight", "eps", *STATIC)(times_ten(OPS.rms_norm_quant, 2)),
    ),
    "1/scale for scale": ("rms_norm_quant", in_order("x", "weight", "eps", *STATIC)(_swap_static)),
    "1/scale for scale, gate": ("silu_mul_quant", in_order("x", "reciprocal", "scale")(OPS.silu_mul_quant)),
    "1/scale for scale, added": (
        "add_rms_norm_quant",
        in_order(*ADD, "reciprocal", "scale")(OPS.add_rms_norm_quant),
    ),
    "cut and not rounded": ("rms_norm_quant", in_order("x", "weight", "eps", *STATIC)(_cut_static)),
    "odd numbers cut, dynamic": ("rms_norm_dynamic_quant", in_order("x", "weight", "eps")(_cut_dynamic)),
    "offset dropped": ("add_rms_norm_quant/offset", in_order(*ADD, *STATIC)(OPS.add_rms_norm_quant)),
    "other eps, dynamic": (
        "rms_norm_dynamic_quant",
        in_order("x", "weight", "eps")(times_ten(OPS.rms_norm_dynamic_quant, 2)),
    ),
    "scale of another tensor": ("add_rms_norm_dynamic_quant", in_order(*ADD)(_scale_of_the_sum)),
    "missing residual, dynamic": (
        "add_rms_norm_dynamic_quant",
        in_order("x", "x", "weight", "eps")(OPS.add_rms_norm_dynamic_quant),
    ),
    "gate and up swapped": ("silu_mul_dynamic_quant", in_order("x")(_halves_swapped)),
    "other eps, heads": (
        "split_qkv_rmsnorm_rope",
        in_order(*NORMED)(_with_values(times_ten(OPS.split_qkv_rmsnorm_rope, 5))),
    ),
    "norms of q and k swapped": (
        "split_qkv_rmsnorm_rope",
        in_order(*QKV, "k_weight", "q_weight", "eps", *HEADS)(_with_values(OPS.split_qkv_rmsnorm_rope)),
    ),
    "biases dropped": (
        "split_qkv_rmsnorm_rope/biases",
        in_order(*NORMED)(_with_values(OPS.split_qkv_rmsnorm_rope)),
    ),
    "biases swapped": (
        "split_qkv_rmsnorm_rope/biases",
        in_order(*NORMED, "k_bias", "q_bias")(_with_values(OPS.split_qkv_rmsnorm_rope)),
    ),
    "keys for values": ("split_qkv_rope", in_order(*QKV, *HEADS)(_keys_for_values)),
    "values of another place": ("split_qkv_rope", in_order(*QKV, *HEADS)(_values_before_keys)),
    "pairs of other channels": (
        "split_qkv_rope",
        in_order(*QKV, *HEADS)(_with_values(lambda *a: OPS.split_qkv_rope(*a, True))),
    ),
}


def graph_of(name: str) -> GraphModule:
    if name in CASES:
        return case_graph(CASES[name])
    norms, biases = "rmsnorm" in name, "qk" if name.endswith("biases") else ""
    weights = [(8,)] * (2 * norms + len(biases))
    made: GraphModule = graph(attend(norms=norms, biases=biases), weights=weights)
    PassManager(made).apply()  # into the canonical form
    return made


@pytest.mark.parametrize("why", WRONG)
def test_a_wrong_version_is_refused(why: str) -> None:
    name, replacement = WRONG[why]
    module = graph_of(name)
    text = str(module.graph)
    right = FUSIONS[name.partition("/")[0]]()
    assert isinstance(right, PatternPass)
    manager = PassManager(module, verify=True)
    manager.add(dataclasses.replace(right, name="wrong", replacement=replacement))
    entry = manager.apply(expectations=False)["wrong"]
    assert (entry.status, entry.matches) == ("refused", 0), entry
    assert entry.error is not None and entry.error > 0 and "allowed" in entry.reason
    assert str(module.graph) == text

    # The right one is let through on the same graph, so it is the replacement that is refused.
    manager = PassManager(module, verify=True)
    manager.add(right)
    assert manager.apply(expectations=False)[right.name].error == 0.0


def test_queries_and_keys_swapped_with_as_many_heads() -> None:
    def swapped(**found: Any) -> Any:
        q, k = OPS.split_qkv_rope(*(found[name] for name in (*QKV, *HEADS)))
        return k, q, found["qkv"][:, -32:].view(-1, 4, 8)

    module = graph(attend(4, 4, norms=False), kv_heads=4)
    manager = PassManager(module, verify=True, strict=True)
    manager.add(dataclasses.replace(FUSIONS["split_qkv_rope"](), name="swapped", replacement=swapped))
    with pytest.raises(VerificationError, match="pass swapped: "):
        manager.apply()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_wrong_eps_is_seen_in_16_bits_too(dtype: torch.dtype) -> None:
    _, replacement = WRONG["other eps, added"]
    manager = PassManager(case_graph(CASES["add_rms_norm"], dtype=dtype), verify=True)
    manager.add(dataclasses.replace(FUSIONS["add_rms_norm"](), name="wrong", replacement=replacement))
    assert manager.apply(expectations=False)["wrong"].status == "refused"
