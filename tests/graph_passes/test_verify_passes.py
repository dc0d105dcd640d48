"""Verification refuses wrong rewrites by name, and lets right ones through."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pass_graphs import (
    OPS,
    TEST_OPS,
    count,
    function_graph,
    model_graph,
    qkv_norm_rope,
    random_model,
    warnings_of,
)
from torch import Tensor
from torch.fx import Graph, GraphModule

from piecework.graph.passes import (
    BITWISE,
    Bound,
    GraphPass,
    Pass,
    PassContext,
    PassManager,
    PatternPass,
    VerificationError,
    tolerance,
)

EPS = 1e-5
LOOSE = tolerance(1e-2, 1e-2, 5e-2)


def norm_pass(name: str, replacement: Callable[..., Any], bound: Bound = LOOSE) -> PatternPass:
    def pattern(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        h = residual + x
        return OPS.rms_norm(h, weight, EPS), h

    return PatternPass(name=name, pattern=pattern, replacement=replacement, bound=bound)


def other_eps() -> Pass:
    def replacement(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        return TEST_OPS.add_rms_norm(x, residual, weight, 1e-6)

    return norm_pass("other_eps", replacement)


def missing_residual() -> Pass:
    def replacement(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        return OPS.rms_norm(x, weight, EPS), residual + x

    return norm_pass("missing_residual", replacement)


def residual_not_added() -> Pass:
    def replacement(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        return TEST_OPS.add_rms_norm(x, residual, weight, EPS)[0], residual

    return norm_pass("residual_not_added", replacement)


def missing_weight() -> Pass:
    def replacement(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        return TEST_OPS.add_rms_norm(x, residual, torch.ones_like(weight), EPS)

    return norm_pass("missing_weight", replacement)


def results_swapped() -> Pass:
    def replacement(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        y, h = TEST_OPS.add_rms_norm(x, residual, weight, EPS)
        return h, y

    return norm_pass("results_swapped", replacement)


def queries_and_keys_swapped() -> Pass:
    def pattern(positions: Tensor, q: Tensor, k: Tensor, cos_sin: Tensor) -> Any:
        q, k = OPS.rotary(positions, q, k, cos_sin)
        return q, k

    def replacement(positions: Tensor, q: Tensor, k: Tensor, cos_sin: Tensor) -> Any:
        k, q = OPS.rotary(positions, k, q, cos_sin)
        return k, q

    return PatternPass(name="queries_and_keys_swapped", pattern=pattern, replacement=replacement, bound=LOOSE)


def inverse_scale() -> Pass:
    def pattern(x: Tensor, scale: Tensor) -> Any:
        return x / scale

    def replacement(x: Tensor, scale: Tensor) -> Any:
        return x * scale

    return PatternPass(name="inverse_scale", pattern=pattern, replacement=replacement, bound=LOOSE)


def dropped_bias() -> Pass:
    def pattern(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        return OPS.linear(x, weight, bias)

    def replacement(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        return OPS.linear(x, weight, None)

    return PatternPass(name="dropped_bias", pattern=pattern, replacement=replacement, bound=LOOSE)


def wrong_user_count() -> Pass:
    """Takes the sum for its own, and gives its other users the result of the norm."""

    def rewrite(graph: Graph, context: PassContext) -> int:
        found = 0
        for norm in [n for n in graph.nodes if n.target is OPS.rms_norm.default]:
            h = norm.args[0]
            if h.target is torch.ops.aten.add.Tensor:
                with graph.inserting_before(norm):
                    fused = graph.call_function(
                        TEST_OPS.add_rms_norm.default, (h.args[1], h.args[0], norm.args[1], EPS)
                    )
                    made = graph.call_function(operator.getitem, (fused, 0))
                norm.replace_all_uses_with(made)
                h.replace_all_uses_with(made)
                graph.erase_node(norm)
                graph.erase_node(h)
                found += 1
        return found

    return GraphPass(name="wrong_user_count", rewrite=rewrite, bound=LOOSE)


def half_precision_inside() -> Pass:
    def replacement(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        h = residual + x
        small = OPS.rms_norm(h.to(torch.float16), weight.to(torch.float16), EPS)
        return small.to(torch.float32), h

    return norm_pass("half_precision_inside", replacement)


def not_bitwise() -> Pass:
    def replacement(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        h = residual + x
        return OPS.rms_norm(h, weight, EPS) * (1 + 1e-6), h

    return norm_pass("not_bitwise", replacement, BITWISE)


def norms(residual: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = residual + x
    return OPS.rms_norm(h, weight, EPS), h


def norm_graph() -> GraphModule:
    return function_graph(norms, ("T", 16), ("T", 16), (16,))


def rotary_graph() -> GraphModule:
    positions, table = torch.empty(7, dtype=torch.int64), torch.empty(32, 8)
    shapes = (positions, (7, 4, 8), (7, 4, 8), table)
    return function_graph(lambda p, q, k, c: OPS.rotary(p, q, k, c), *shapes)


def scale_graph() -> GraphModule:
    return function_graph(lambda x, s: x / s, ("T", 16), (1,))


def linear_graph() -> GraphModule:
    return function_graph(lambda x, w, b: OPS.linear(x, w, b), ("T", 16), (8, 16), (8,))


WRONG = [
    (other_eps, norm_graph),
    (missing_residual, norm_graph),
    (residual_not_added, norm_graph),
    (missing_weight, norm_graph),
    (results_swapped, norm_graph),
    (queries_and_keys_swapped, rotary_graph),
    (inverse_scale, scale_graph),
    (dropped_bias, linear_graph),
    (wrong_user_count, norm_graph),
    (half_precision_inside, norm_graph),
    (not_bitwise, norm_graph),
]
NAMES = [made_by.__name__ for made_by, _ in WRONG]


@pytest.mark.parametrize(("made_by", "graph"), WRONG, ids=NAMES)
def test_a_wrong_rewrite_is_refused_by_name_and_undone(
    made_by: Callable[[], Pass], graph: Callable[[], GraphModule], caplog: pytest.LogCaptureFixture
) -> None:
    name = made_by.__name__
    module = graph()
    without = [n.format_node() for n in module.graph.nodes]
    manager = PassManager(module, verify=True)
    manager.disable("canonicalise")
    manager.add(made_by)
    entry = manager.apply()[name]
    assert (entry.status, entry.matches) == ("refused", 0)
    assert entry.error is not None and entry.error > 0
    assert [n.format_node() for n in module.graph.nodes] == without
    (warning,) = warnings_of(caplog)
    assert warning.startswith(f"pass {name}: ") and warning.endswith("; the graph is left as it was")
    strict = PassManager(graph(), verify=True, strict=True)
    strict.add(made_by)
    with pytest.raises(VerificationError, match=f"^pass {name}: ") as caught:
        strict.apply()
    assert caught.value.name == name and caught.value.error > caught.value.allowed


@pytest.mark.parametrize(("made_by", "graph"), WRONG, ids=NAMES)
def test_without_verification_the_same_rewrites_go_through(
    made_by: Callable[[], Pass], graph: Callable[[], GraphModule]
) -> None:
    # So it was verification that refused them, and not the matcher.
    manager = PassManager(graph())
    manager.add(made_by)
    assert manager.apply()[made_by.__name__].matches == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("made_by", [other_eps, missing_residual, residual_not_added, wrong_user_count])
def test_wrong_rewrites_in_a_deep_model_are_refused(made_by: Callable[[], Pass], dtype: torch.dtype) -> None:
    module = model_graph(random_model("qwen3", dtype=dtype, num_hidden_layers=4))
    manager = PassManager(module, verify=True)
    manager.add(made_by)
    assert manager.apply()[made_by.__name__].status == "refused"
    assert count(module, "passtest::add_rms_norm") == 0


def test_a_refused_pass_does_not_stop_the_next() -> None:
    module = model_graph(random_model("qwen3"))
    manager = PassManager(module, verify=True)
    manager.add(other_eps)
    manager.add(qkv_norm_rope)
    report = manager.apply()
    assert (report["other_eps"].status, report["qkv_norm_rope"].status) == ("refused", "applied")


def test_the_measured_error_is_reported() -> None:
    def replacement(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        h = residual + x
        return OPS.rms_norm(h, weight, EPS) * 1.001, h

    manager = PassManager(norm_graph(), verify=True)
    manager.add(norm_pass("nearly", replacement))
    entry = manager.apply()["nearly"]
    assert entry.status == "applied" and not entry.bitwise
    assert entry.error == pytest.approx(1e-3, rel=1e-2)


def test_a_pass_that_fails_to_run_is_refused_with_the_reason() -> None:
    def replacement(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        h = residual + x
        return OPS.rms_norm(h, weight, EPS).view(7, 16).view(-1, 16), h

    # The fake values say T, running says that T is not 7.
    module = function_graph(norms, (7, 16), (7, 16), (16,))
    manager = PassManager(module, verify=True)
    manager.add(norm_pass("one_size", replacement))
    assert manager.apply()["one_size"].status == "applied"
    manager = PassManager(norm_graph(), verify=True)
    manager.add(norm_pass("one_size", replacement))
    entry = manager.apply()["one_size"]
    assert entry.status in ("failed", "refused") and entry.reason


def test_results_are_infinitely_wrong_where_only_one_is_finite() -> None:
    module = function_graph(lambda x: torch.reciprocal(torch.reciprocal(x)), ("T", 4))

    def pattern_of_reciprocals(x: Tensor) -> Any:
        return torch.reciprocal(torch.reciprocal(x))

    manager = PassManager(module, verify=True)
    manager.add(
        PatternPass(
            name="scaled_up",
            pattern=pattern_of_reciprocals,
            replacement=lambda x: (x * 1e30) * 1e-30,
            bound=LOOSE,
        )
    )
    entry = manager.apply()["scaled_up"]
    assert entry.status == "refused" and entry.error == math.inf
