"""A pass that breaks the graph is undone, and says how it broke it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pass_graphs import (
    OPS,
    function_graph,
    warnings_of,
)
from torch.fx import Graph, GraphModule

from piecework.graph.passes import (
    GraphPass,
    PassContext,
    PassError,
    PassManager,
)


def small_graph() -> GraphModule:
    return function_graph(lambda x, w: OPS.rms_norm(x, w, 1e-5) * 2, ("T", 8), (8,))


def breaks(graph: Graph, context: PassContext) -> int:
    raise RuntimeError("no luck")


def drops_an_output(graph: Graph, context: PassContext) -> int:
    (output,) = graph.find_nodes(op="output")
    (last,) = output.args[0] if isinstance(output.args[0], tuple | list) else output.args
    output.args = ((last, last),)
    return 1


def changes_shape(graph: Graph, context: PassContext) -> int:
    (output,) = graph.find_nodes(op="output")
    (last,) = output.all_input_nodes
    with graph.inserting_before(output):
        output.replace_input_with(last, graph.call_function(torch.ops.aten.sum.dim_IntList, (last, [1])))
    return 1


def adds_an_input(graph: Graph, context: PassContext) -> int:
    with graph.inserting_before(next(iter(graph.nodes))):
        graph.placeholder("more").meta["val"] = next(iter(graph.nodes)).meta["val"]
    return 1


def ends_the_process(graph: Graph, context: PassContext) -> int:
    raise SystemExit(0)


def uses_wrong_arguments(graph: Graph, context: PassContext) -> int:
    (norm,) = graph.find_nodes(op="call_function", target=OPS.rms_norm.default)
    norm.args = (norm.args[0], norm.args[1])
    return 1


@pytest.mark.parametrize(
    ("rewrite", "reason"),
    [
        (breaks, "RuntimeError: no luck"),
        (drops_an_output, "the graph had 1 outputs and has 2"),
        (changes_shape, "output 0 was"),
        (adds_an_input, "inputs changed"),
        (uses_wrong_arguments, "missing"),
        (ends_the_process, "SystemExit: 0"),
        (lambda graph, context: None, "returned None, neither a number of rewrites nor an Outcome"),
        (lambda graph, context: "1", "returned '1', neither"),
        (lambda graph, context: -1, "returned -1, neither"),
        (lambda graph, context: 1.5, "returned 1.5, neither"),
    ],
)
def test_a_pass_that_breaks_the_graph_is_undone(
    rewrite: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    module = small_graph()
    before = [n.format_node() for n in module.graph.nodes]
    x, weight = torch.randn(3, 8), torch.randn(8)
    expected = module(x, weight)
    pm = PassManager(module)
    pm.add(GraphPass(name="broken", rewrite=rewrite))
    entry = pm.apply()["broken"]
    assert entry.status == "failed" and reason in entry.reason
    assert [n.format_node() for n in module.graph.nodes] == before
    torch.testing.assert_close(module(x, weight), expected)
    (warning,) = warnings_of(caplog)
    assert warning.startswith("pass broken: ")
    strict = PassManager(small_graph(), strict=True)
    strict.add(GraphPass(name="broken", rewrite=rewrite))
    with pytest.raises(PassError, match=r"^pass broken: "):
        strict.apply()
