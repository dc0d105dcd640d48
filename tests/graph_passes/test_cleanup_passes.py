"""Dead code and common subexpressions, and what they must leave alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pass_graphs import OPS, count, function_graph, model_graph, random_model
from torch import Tensor
from torch.fx import GraphModule

from piecework.graph.passes import PassManager, make_manager

X = ("T", 8)


def cleaned(fn: Callable[..., Any], *shapes: Any) -> GraphModule:
    module = function_graph(fn, *shapes)
    make_manager(verify=True, strict=True).apply(module)
    return module


def test_what_nobody_uses_is_removed() -> None:
    def fn(x: Tensor) -> Tensor:
        a, b = x.split([4, 4], -1)
        torch.sin(b).sum()
        return a * 2

    module = cleaned(fn, X)
    assert (count(module, "aten::sin"), count(module, "aten::sum"), count(module, "getitem")) == (0, 0, 1)


def test_writes_and_random_numbers_stay() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        torch.rand(3)
        y.add_(1)
        return x * 2

    module = cleaned(fn, X, X)
    assert (count(module, "aten::rand"), count(module, "aten::add_")) == (1, 1)


def test_what_is_computed_twice_is_computed_once() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.sin(x.view(-1, 2, 4)) + torch.sin(x.reshape(-1, 2, 4))

    module = cleaned(fn, X)
    assert (count(module, "aten::sin"), count(module, "aten::view")) == (1, 1)
    x = torch.randn(3, 8)
    torch.testing.assert_close(module(x), fn(x), rtol=0, atol=0)


def test_literals_and_overloads_tell_calls_apart() -> None:
    def fn(x: Tensor) -> Tensor:
        return OPS.rms_norm(x, x[0], 1e-5) + OPS.rms_norm(x, x[0], 1e-6) + (x + 1) + (x + 1.0)

    module = cleaned(fn, X)
    assert count(module, "piecework::rms_norm") == 2
    assert count(module, "aten::add") == 5


def test_random_numbers_and_fresh_memory_are_not_merged() -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        a, b = torch.empty_like(x), torch.empty_like(x)
        a.copy_(x)
        b.copy_(x * 2)
        return a, b, torch.rand_like(x), torch.rand_like(x)

    module = function_graph(fn, X)
    make_manager(strict=True).apply(module)
    assert (count(module, "aten::empty_like"), count(module, "aten::rand_like")) == (2, 2)


def test_reads_before_and_after_a_write_are_not_merged() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        before = torch.sin(x)
        x.mul_(2)
        return before, torch.sin(x)

    module = cleaned(fn, X)
    assert count(module, "aten::sin") == 2
    x = torch.randn(3, 8)
    torch.testing.assert_close(module(x.clone()), fn(x.clone()), rtol=0, atol=0)


def test_nothing_is_merged_across_a_hole() -> None:
    def fn(q: Tensor, w: Tensor) -> Tensor:
        out = torch.empty_like(q)
        a = torch.sin(w)
        OPS.attention(q, q, q, out, 0, 1.0, 0)
        return out + a + torch.sin(w) + torch.sin(w)

    module = cleaned(fn, ("T", 2, 4), (2, 4))
    assert count(module, "aten::sin") == 2


def test_models_have_nothing_to_clean_up() -> None:
    module = model_graph(random_model("qwen3_moe"))
    report = make_manager(verify=True, strict=True).apply(module)
    assert (report["common_subexpressions"].matches, report["dead_code"].matches) == (0, 0)


def test_dead_code_after_a_pass_goes_with_it() -> None:
    module = function_graph(lambda x: x.contiguous().view(-1, 8) * 2, X)
    PassManager(module).apply()
    assert [n.name for n in module.graph.nodes if n.op == "call_function"] == ["mul"]
