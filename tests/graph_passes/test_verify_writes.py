"""Verification where memory is written: values, literals and places that change are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pass_graphs import (
    OPS,
    calls,
    function_graph,
    model_graph,
    random_model,
)
from torch import Tensor
from torch.fx import Graph

from piecework.graph.passes import (
    GraphPass,
    PassContext,
    PassManager,
    PatternPass,
    tolerance,
)

LOOSE = tolerance(1e-2, 1e-2, 5e-2)


def swap_attention_arguments(graph: Graph, context: PassContext) -> int:
    found = [n for n in graph.nodes if n.target is OPS.attention.default]
    for node in found:
        q, k, v, *others = node.args
        node.args = (q, v, k, *others)
    return len(found)


def test_a_kept_node_that_gets_other_values_is_refused() -> None:
    module = model_graph(random_model("llama"))
    manager = PassManager(module, verify=True)
    manager.add(GraphPass(name="keys_for_values", rewrite=swap_attention_arguments, bound=LOOSE))
    assert manager.apply()["keys_for_values"].status == "refused"


def change_scale(graph: Graph, context: PassContext) -> int:
    found = [n for n in graph.nodes if n.target is OPS.attention.default]
    for node in found:
        node.args = (*node.args[:5], node.args[5] * 2, *node.args[6:])
    return len(found)


def test_another_literal_of_a_writing_op_is_refused() -> None:
    module = model_graph(random_model("llama", num_hidden_layers=2))
    scale = calls(module, "piecework::attention")[0].args[5]
    manager = PassManager(module, verify=True)
    manager.add(GraphPass(name="scale_twice", rewrite=change_scale, bound=LOOSE))
    assert manager.apply()["scale_twice"].status == "refused"
    assert calls(module, "piecework::attention")[0].args[5] == scale


def test_a_writing_op_may_be_replaced_by_one_that_does_the_same() -> None:
    def rewrite(graph: Graph, context: PassContext) -> int:
        found = [n for n in graph.nodes if n.target is OPS.attention.default]
        for node in found:
            with graph.inserting_before(node):
                graph.call_function(node.target, node.args)
            graph.erase_node(node)
        return len(found)

    module = model_graph(random_model("llama", num_hidden_layers=2))
    manager = PassManager(module, verify=True)
    manager.add(GraphPass(name="same_attention", rewrite=rewrite))
    entry = manager.apply()["same_attention"]
    assert (entry.status, entry.error) == ("applied", 0.0)


def test_a_read_that_moves_across_a_write_is_refused_without_verification() -> None:
    def rewrite(graph: Graph, context: PassContext) -> int:
        first = next(n for n in graph.nodes if n.target is OPS.attention.default)
        (read,) = [n for n in first.args[3].users if n is not first]
        first.prepend(read)
        return 1

    manager = PassManager(model_graph(random_model("llama", num_hidden_layers=2)))
    manager.add(GraphPass(name="reads_early", rewrite=rewrite))
    entry = manager.apply()["reads_early"]
    assert entry.status == "failed" and "ran after the writes ['attention']" in entry.reason


def input_is_written(x: Tensor) -> Any:
    y = x * 1.0
    x.mul_(2)
    return y


def view_of_it_is_written(x: Tensor) -> Any:
    y = x * 1.0
    x.view(-1, 2, 4)[:, 1].mul_(2)
    return y.view(-1)


def result_is_written(x: Tensor) -> Any:
    y = x * 1.0
    y.mul_(2)
    return y, x + 1


def written_before(x: Tensor) -> Any:
    x.mul_(2)
    return x * 1.0 + 1


WRITES = [input_is_written, view_of_it_is_written, result_is_written, written_before]


def drop_ones(graph: Graph, context: PassContext) -> int:
    found = [n for n in graph.nodes if n.target is torch.ops.aten.mul.Tensor and n.args[1] == 1.0]
    for node in found:
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    return len(found)


def times_one(x: Tensor) -> Any:
    return x * 1.0


@pytest.mark.parametrize("fn", WRITES)
@pytest.mark.parametrize("kind", ["pattern", "graph"])
def test_an_input_in_place_of_a_result_where_one_is_written(kind: str, fn: Any) -> None:
    module = function_graph(fn, (6, 8))
    manager = PassManager(module)
    if kind == "graph":
        manager.add(GraphPass(name="drop_ones", rewrite=drop_ones))
    else:
        manager.add(PatternPass(name="drop_ones", pattern=times_one, replacement=lambda x: x))
    entry = manager.apply()["drop_ones"]
    right = fn is written_before
    status = "applied" if right else ("failed" if kind == "graph" else "no match")
    assert (entry.status, entry.matches) == (status, int(right))
    found, expected = module(torch.ones(6, 8)), fn(torch.ones(6, 8))
    torch.testing.assert_close(
        found[0] if isinstance(expected, Tensor) and isinstance(found, tuple) else found, expected
    )


def test_a_copy_in_place_of_a_view_that_is_written() -> None:
    def fn(x: Tensor) -> Any:
        x.view(-1, 2, 4).mul_(2)
        return x + 1

    def rewrite(graph: Graph, context: PassContext) -> int:
        (view,) = graph.find_nodes(op="call_function", target=torch.ops.aten.view.default)
        with graph.inserting_before(view):
            copy = graph.call_function(torch.ops.aten.clone.default, (view.args[0],))
        view.replace_input_with(view.args[0], copy)
        return 1

    manager = PassManager(function_graph(fn, (6, 8)))
    manager.add(GraphPass(name="copies", rewrite=rewrite))
    entry = manager.apply()["copies"]
    assert entry.status == "failed" and "no longer memory of x" in entry.reason


def test_a_replacement_that_writes_into_its_input() -> None:
    def pattern(x: Tensor, residual: Tensor) -> Any:
        return residual + x

    manager = PassManager(function_graph(lambda x, r: (r + x, x * 3), ("T", 8), ("T", 8)), verify=True)
    manager.add(
        PatternPass(name="in_place", pattern=pattern, replacement=lambda x, residual: x.add_(residual))
    )
    assert manager.apply()["in_place"].status in ("failed", "refused")
