"""Verification where memory is written: values, literals and places that change are refused."""

from __future__ import annotations

from pass_graphs import (
    OPS,
    calls,
    model_graph,
    random_model,
)
from torch.fx import Graph

from piecework.graph.passes import (
    GraphPass,
    PassContext,
    PassManager,
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
