"""What a pattern matches, and what it must not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pass_graphs import OPS, function_graph
from torch import Tensor
from torch.fx import GraphModule

from piecework.graph.passes import Match, PassManager, PatternError, PatternPass
from piecework.graph.passes.match import Matcher
from piecework.graph.passes.pattern import read_pattern

ATEN = torch.ops.aten


def canonical(fn: Callable[..., Any], *shapes: Any) -> GraphModule:
    module = function_graph(fn, *shapes)
    PassManager(module).apply()
    return module


def matches(pattern: Callable[..., Any], fn: Callable[..., Any], *shapes: Any) -> list[Match]:
    matcher = Matcher(read_pattern("p", pattern), canonical(fn, *shapes).graph)
    found = [next(iter(matcher.at(anchor)), None) for anchor in matcher.anchors()]
    return [m for m in found if m is not None]


X = ("T", 8)


def test_literals_must_be_equal() -> None:
    def graph(x: Tensor, w: Tensor) -> Tensor:
        return OPS.rms_norm(x, w, 1e-5)

    assert len(matches(lambda x, w: OPS.rms_norm(x, w, 1e-5), graph, X, (8,))) == 1
    assert matches(lambda x, w: OPS.rms_norm(x, w, 1e-6), graph, X, (8,)) == []
    assert matches(lambda x, w: OPS.rms_norm(x, w, 1.0000001e-5), graph, X, (8,)) == []


@pytest.mark.parametrize(("literal", "found"), [(2, 1), (2.0, 0), (3, 0), (True, 0)])
def test_numbers_of_other_types_are_other_literals(literal: Any, found: int) -> None:
    assert len(matches(lambda x: ATEN.pow(x, literal), lambda x: x.pow(2), X)) == found


def test_an_integer_for_a_float_argument_is_that_float() -> None:
    graph = lambda x, w: OPS.rms_norm(x, w, 1.0)  # noqa: E731
    assert len(matches(lambda x, w: OPS.rms_norm(x, w, 1), graph, X, (8,))) == 1


def test_a_placeholder_may_stand_for_a_literal() -> None:
    (match,) = matches(
        lambda x, w, eps: OPS.rms_norm(x, w, eps), lambda x, w: OPS.rms_norm(x, w, 1e-5), X, (8,)
    )
    assert match["eps"] == match.value("eps") == 1e-5
    assert list(match.value("w").shape) == [8] and match["w"].op == "placeholder"


def test_one_placeholder_stands_for_one_value() -> None:
    def twice(x: Tensor, w: Tensor, eps: float) -> Any:
        return OPS.rms_norm(OPS.rms_norm(x, w, eps), w, eps)

    def graph(first: float, second: float) -> Callable[..., Tensor]:
        return lambda x, w: OPS.rms_norm(OPS.rms_norm(x, w, first), w, second)

    assert len(matches(twice, graph(1e-5, 1e-5), X, (8,))) == 1
    assert matches(twice, graph(1e-5, 1e-6), X, (8,)) == []
    other = lambda x, w, v: OPS.rms_norm(OPS.rms_norm(x, w, 1e-5), v, 1e-5)  # noqa: E731
    assert matches(twice, other, X, (8,), (8,)) == []


def test_two_placeholders_may_stand_for_one_value() -> None:
    def two(x: Tensor, v: Tensor, w: Tensor) -> Any:
        return OPS.rms_norm(OPS.rms_norm(x, v, 1e-5), w, 1e-5)

    tied = lambda x, w: OPS.rms_norm(OPS.rms_norm(x, w, 1e-5), w, 1e-5)  # noqa: E731
    assert len(matches(two, tied, X, (8,))) == 1


def test_annotations_say_what_a_placeholder_stands_for() -> None:
    def tensor(x: Tensor, y: Tensor) -> Any:
        return x + y

    def literal(x: Tensor, y: float) -> Any:
        return x + y

    add_number, add_tensor = (lambda x, y: x + 1.5), (lambda x, y: x + y)
    counts = [len(matches(p, g, X, X)) for p in (tensor, literal) for g in (add_number, add_tensor)]
    assert counts == [0, 1, 1, 0]


def test_sums_and_products_match_in_both_orders() -> None:
    def pattern(x: Tensor, y: Tensor) -> Any:
        return torch.sin(x) + y * 2

    assert len(matches(pattern, lambda x, y: 2 * y + torch.sin(x), X, X)) == 1
    assert len(matches(pattern, lambda x, y: torch.sin(x) + y * 2, X, X)) == 1
    assert matches(lambda x, y: torch.sin(x) - y, lambda x, y: y - torch.sin(x), X, X) == []


def test_dims_are_counted_from_either_end() -> None:
    for graph in (lambda x: torch.softmax(x, -1), lambda x: torch.softmax(x, 1)):
        counts = [len(matches(lambda x, d=d: ATEN.softmax(x, d), graph, X)) for d in (-1, 1, 0, -2)]
        assert counts == [1, 1, 0, 0]


def test_defaults_and_keywords_are_the_same_as_positions() -> None:
    graph = lambda x: x.mean(dim=-1, keepdim=True)  # noqa: E731
    assert len(matches(lambda x: x.mean(-1, keepdim=True), graph, X)) == 1
    assert len(matches(lambda x: ATEN.mean(x, [1], True), graph, X)) == 1
    assert matches(lambda x: x.mean(-1), graph, X) == []
    assert len(matches(lambda x, y: torch.add(x, y, alpha=1), lambda x, y: x + y, X, X)) == 1


def test_view_sizes_are_compared_by_the_shape_they_give() -> None:
    for tokens in ("T", 6):
        graph = lambda x: x.view(-1, 2, 4)  # noqa: E731
        assert len(matches(lambda x: x.view(-1, 2, 4), graph, (tokens, 8))) == 1
        assert matches(lambda x: x.view(-1, 4, 2), graph, (tokens, 8)) == []
        assert matches(lambda x: x.view(-1, 8), graph, (tokens, 8)) == []
        (match,) = matches(lambda x, a, b: x.view(-1, a, b), graph, (tokens, 8))
        assert (match["a"], match["b"]) == (2, 4)


def test_results_of_an_op_are_told_apart() -> None:
    def crossed(x: Tensor) -> Any:
        a, b = x.split([4, 4], -1)
        return torch.sin(b) + a

    def straight(x: Tensor) -> Any:
        a, b = x.split([4, 4], -1)
        return torch.sin(a) + b

    assert len(matches(straight, straight, X)) == 1
    assert matches(straight, crossed, X) == []


def test_an_overload_in_the_pattern_is_that_overload() -> None:
    graph = lambda x, y: x + y  # noqa: E731
    assert len(matches(lambda x, y: ATEN.add.Tensor(x, y), graph, X, X)) == 1
    assert matches(lambda x, y: ATEN.add.Scalar(x, y), graph, X, X) == []


def test_results_that_share_only_an_input_are_found() -> None:
    def pattern(x: Tensor, v: Tensor, w: Tensor) -> Any:
        return OPS.linear(x, v), torch.sin(OPS.linear(x, w))

    def graph(x: Tensor, v: Tensor, w: Tensor) -> Any:
        return torch.sin(OPS.linear(x, v)), OPS.linear(x, w)

    (match,) = matches(pattern, graph, X, (4, 8), (4, 8))
    assert match["w"].name.startswith("v") and match["v"].name.startswith("w")


def test_ops_of_different_numbers_of_results_are_replaced() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.split([4, 4], -1)
        return torch.sin(a), torch.sin(b) * 2

    def pattern(x: Tensor) -> Any:
        a, b = x.split([4, 4], -1)
        return torch.sin(a), torch.sin(b)

    def replacement(x: Tensor) -> Any:
        a, b = torch.sin(x).split([4, 4], -1)
        return a, b

    module = function_graph(fn, X)
    pm = PassManager(module, verify=True, strict=True)
    pm.add(PatternPass(name="sin_first", pattern=pattern, replacement=replacement, expect=1))
    pm.apply()
    x = torch.randn(5, 8)
    torch.testing.assert_close(module(x), fn(x), rtol=0, atol=0)


def test_overlapping_matches_are_taken_in_order() -> None:
    module = function_graph(lambda x: torch.sin(torch.sin(torch.sin(x))), X)
    pm = PassManager(module, verify=True)
    pm.add(
        PatternPass(
            name="pairs",
            pattern=lambda x: torch.sin(torch.sin(x)),
            replacement=lambda x: torch.sin(torch.sin(x)) * 1.0,
        )
    )
    entry = pm.apply()["pairs"]
    assert (entry.matches, entry.refused) == (1, {"overlaps an earlier match": 1})


def test_a_chain_of_matches_uses_the_results_of_earlier_ones() -> None:
    def fn(x: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.sin(x) * 2
        return x

    module = function_graph(fn, X)
    pm = PassManager(module, verify=True, strict=True)
    pm.add(
        PatternPass(
            name="twice",
            pattern=lambda x: torch.sin(x) * 2,
            replacement=lambda x: torch.sin(x) + torch.sin(x),
            expect=4,
        )
    )
    pm.apply()
    x = torch.randn(5, 8)
    torch.testing.assert_close(module(x), fn(x), rtol=0, atol=0)


def test_a_replacement_of_another_dtype_or_shape_is_refused() -> None:
    for change in (lambda y: y.to(torch.float16), lambda y: y.sum(0)):
        pm = PassManager(function_graph(lambda x: torch.sin(x) * 2, X))
        pm.add(
            PatternPass(
                name="other",
                pattern=lambda x: torch.sin(x),
                replacement=lambda x, c=change: c(torch.sin(x)),
            )
        )
        refused = pm.apply()["other"].refused
        assert list(refused) == ["the replacement of aten.sin has another shape or dtype"]


def test_a_replacement_sees_shapes_and_literals() -> None:
    def replacement(x: Tensor, n: int) -> Any:
        assert isinstance(n, int) and x.shape[-1] == 8 and x.dtype is torch.float32
        return x.view(*x.shape[:-1], n, x.shape[-1] // n)

    module = function_graph(lambda x: x.view(-1, 2, 4) * 1, X)
    pm = PassManager(module, verify=True, strict=True)
    pm.add(PatternPass(name="v", pattern=lambda x, n: x.view(-1, n, 4), replacement=replacement, expect=1))
    pm.apply()


BAD_PATTERNS: list[tuple[Callable[..., Any], str]] = [
    (lambda x: x, "returns a parameter"),
    (lambda x: (torch.sin(x), 3), "must return a tensor"),
    (lambda x, y: torch.sin(x), "doesn't use y"),
    (lambda x, y: (torch.sin(x), torch.sin(y)), "share nothing"),
    (lambda x: torch.sin(x[:, :4]), "write a slice as split"),
    (lambda x: x.no_such_op(), "no_such_op is no op"),
    (lambda x: torch.sin(x) if x.sum() > 0 else x, "can't be read: TraceError"),
    (lambda *x: torch.sin(x[0]), "must be a plain one"),
    (lambda q, k, v, o: OPS.attention(q, k, v, o, 0, 1.0, 0), "writes into its arguments"),
]


@pytest.mark.parametrize(("pattern", "reason"), BAD_PATTERNS, ids=[r for _, r in BAD_PATTERNS])
def test_a_pattern_that_is_none_is_refused_at_once(pattern: Callable[..., Any], reason: str) -> None:
    with pytest.raises(PatternError, match=f"^pass bad: .*{reason}"):
        PatternPass(name="bad", pattern=pattern, replacement=lambda **kw: None)


def test_a_replacement_with_other_parameters_is_refused() -> None:
    with pytest.raises(PatternError, match=r"replacement can't be called with x, y: missing .* 'z'"):
        PatternPass(name="bad", pattern=lambda x, y: x + y, replacement=lambda x, y, z: x + y)


def one_sin(replacement: Callable[..., Any]) -> str:
    pm = PassManager(function_graph(lambda x: torch.sin(x) * 2, X))
    pm.add(PatternPass(name="bad", pattern=lambda x: torch.sin(x), replacement=replacement))
    return pm.apply()["bad"].reason


def test_a_replacement_that_is_none_is_refused() -> None:
    assert "replacement returns 2 results, pattern 1" in one_sin(lambda x: (x, x))
    assert "replacement fails: ZeroDivisionError" in one_sin(lambda x: x / (1 // 0))
    assert "makes a constant tensor" in one_sin(lambda x: x + torch.tensor([1.0] * 8))
