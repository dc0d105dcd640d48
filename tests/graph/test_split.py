"""Cutting graphs: what crosses a cut, what may be a splitting op, and what makes pieces equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from programs import options
from torch import Tensor

from piecework.graph.build import assemble, build
from piecework.graph.fold import fold, structure
from piecework.graph.program import HoleCall
from piecework.graph.split import SplitError, op_name, split
from piecework.graph.symbols import new_fake_mode, new_symbol, symbolic_sizes
from piecework.graph.trace import trace

ATTENTION = "piecework::attention"


def _attend(x: Tensor, layer: int = 0) -> Tensor:
    q = x.view(-1, 2, 4)
    out = torch.empty_like(q)
    torch.ops.piecework.attention(q, q, q, out, layer, 0.5, 0)
    return out.view(-1, 8)


def _graph(fn: Callable[..., Any], *examples: Tensor) -> torch.fx.Graph:
    return trace(fn, examples or [torch.ones(5, 8)]).graph_module.graph


def _run(fn: Callable[..., Any], splitting_ops: list[str], x: Tensor, **fills: Any) -> Any:
    made = options(splitting_ops=splitting_ops)
    program = build(fn, ["x"], [torch.ones(5, 8)], made)
    assert program.opaque_reason is None
    return program.run([x], fills={name.replace("__", "::"): fn for name, fn in fills.items()})


def test_no_size_crosses_a_cut() -> None:
    def model(x: Tensor) -> Tensor:
        count = 2 * x.shape[0] + 1
        y = _attend(x * count)
        return y * count + x.shape[0]

    parts = split(_graph(model), [ATTENTION])
    for piece in parts.pieces:
        assert all(isinstance(n.meta["val"], Tensor) for n in [*piece.inputs, *piece.outputs])
    for count in (1, 4):
        x = torch.randn(count, 8)
        torch.testing.assert_close(_run(model, [ATTENTION], x), model(x))


def test_a_piece_whose_inputs_do_not_tell_the_count_gets_one_that_does() -> None:
    def model(x: Tensor) -> Tensor:
        both = torch.cat((x, x))
        y = _attend(both)
        return y[: x.shape[0]]

    last = split(_graph(model), [ATTENTION]).pieces[-1]
    assert "input_0" in [n.name for n in last.inputs]
    x = torch.randn(3, 8)
    torch.testing.assert_close(_run(model, [ATTENTION], x), model(x))


def test_tuples_do_not_cross() -> None:
    def model(x: Tensor) -> Tensor:
        low, high = torch.split(x, [4, 4], -1)
        y = _attend(x)
        return torch.cat((y, low, high), -1)

    x = torch.randn(3, 8)
    torch.testing.assert_close(_run(model, [ATTENTION], x), model(x))


def test_order_of_writes_is_kept() -> None:
    def model(x: Tensor) -> Tensor:
        x = x.clone()
        before = x + 1
        y = _attend(x)
        x.mul_(3)
        z = _attend(x, 1)
        x.add_(y)
        return before + z + x

    x = torch.randn(4, 8)
    wanted = model(x)
    torch.testing.assert_close(_run(model, [ATTENTION], x), wanted)


def test_fresh_result_is_copied_to_an_allocated_place() -> None:
    def model(x: Tensor) -> Tensor:
        return torch.softmax(x * 2, -1) + 1

    made = options(splitting_ops=["aten::_softmax"])
    program = build(model, ["x"], [torch.ones(5, 8)], made)
    (hole,) = [s for s in program.steps if isinstance(s, HoleCall)]
    assert hole.result is not None
    seen: list[int] = []

    def fresh(x: Tensor, dim: int, half: bool) -> Tensor:
        result = torch.softmax(x, dim)
        seen.append(result.data_ptr())
        return result

    x = torch.randn(3, 8)
    env = program.environment([x])
    program.run([x], fills={"aten::_softmax": fresh})
    torch.testing.assert_close(program.run([x]), model(x))
    for step in program.steps[:2]:
        if isinstance(step, HoleCall):
            place = env[hole.result].data_ptr()
            step.run(env, fresh)
            assert env[hole.result].data_ptr() == place not in seen
        else:
            results = program.pieces[step.distinct](step.gather(env))
            env[step.outputs[0]], env[step.outputs[-1]] = results[0], results[-1]


def test_splitting_op_that_returns_several_tensors_is_refused_by_name() -> None:
    graph = _graph(lambda x: x.topk(2)[0])
    with pytest.raises(SplitError, match="aten::topk can't be a splitting op"):
        split(graph, ["aten::topk"])


def test_splitting_op_that_returns_a_view_is_refused_by_name() -> None:
    # A view is no place that the op wrote: its argument has another shape, or the same in another order.
    graph = _graph(lambda x: (x.view(-1, 2, 4) + 1).view(-1, 8) * 2)
    with pytest.raises(SplitError, match=r"aten::view can't be a splitting op: it returns a view"):
        split(graph, ["aten::view"])


def test_splitting_op_that_takes_a_size_is_refused_by_name() -> None:
    graph = _graph(lambda x: x.new_zeros(x.shape[0], 2) + 1)
    with pytest.raises(SplitError, match="aten::new_zeros takes sym_size"):
        split(graph, ["aten::new_zeros"])


def test_a_graph_without_splitting_ops_is_one_piece() -> None:
    parts = split(_graph(lambda x: x + 1), [ATTENTION])
    assert len(parts.pieces) == 1 and not parts.holes


def test_op_names() -> None:
    assert op_name(torch.ops.piecework.attention.default) == ATTENTION
    sdpa = torch.nn.functional.scaled_dot_product_attention
    assert op_name(sdpa) == "aten::scaled_dot_product_attention"


def _text(fn: Callable[..., Any], *examples: Tensor) -> str:
    return structure(_graph(fn, *examples))


def test_structure_ignores_names_and_sees_the_rest() -> None:
    base = _text(lambda x: torch.relu(x) * 2.0)
    assert _text(lambda other: torch.relu(other) * 2.0) == base
    assert _text(lambda x: torch.relu(x) * 2.0, torch.ones(9, 8)) == base
    different = [
        _text(lambda x: torch.relu(x) * 2),
        _text(lambda x: torch.relu(x) * 2.5),
        _text(lambda x: torch.sigmoid(x) * 2.0),
        _text(lambda x: torch.relu(x) * x),
        _text(lambda x: torch.relu(x) - x),
        _text(lambda x: x - torch.relu(x)),
        _text(lambda x: torch.relu(x) * 2.0, torch.ones(5, 9)),
        _text(lambda x: torch.relu(x) * 2.0, torch.ones(5, 8, dtype=torch.float64)),
    ]
    assert len({base, *different}) == len(different) + 1


def test_structure_ignores_names_of_sizes() -> None:
    mode, texts = new_fake_mode(), set()
    sizes = [new_symbol(mode, name) for name in ("tokens", "rows")]
    for size in sizes:
        graph = torch.fx.Graph()
        node = graph.placeholder("x")
        with mode, symbolic_sizes():
            node.meta["val"] = torch.empty(size, 8)
        graph.output((node,))
        texts.add(structure(graph))
    assert str(sizes[0]) != str(sizes[1]) and len(texts) == 1


def test_one_tensor_twice_is_not_two_tensors() -> None:
    a, b = torch.ones(8), torch.ones(8)
    graphs = [_graph(lambda x: x * a + a), _graph(lambda x: x * a + b)]
    folded = fold([torch.fx.GraphModule(torch.nn.Module(), g) for g in graphs])
    assert folded.kind == [0, 1]


def test_weight_made_by_a_pass_becomes_an_input() -> None:
    traced = trace(lambda x: x * 2 + 1, [torch.ones(5, 8)])
    module = traced.graph_module
    module.register_buffer("twice", torch.full((8,), 5.0))
    (mul,) = [n for n in module.graph.nodes if n.target is torch.ops.aten.mul.Tensor]
    with module.graph.inserting_before(mul):
        made = module.graph.get_attr("twice")
    with mul.meta["val"].fake_mode:
        made.meta["val"] = torch.empty(8)
    mul.args = (mul.args[0], made)
    program = assemble(traced, options())
    assert [b.name for b in program.bindings if b.kind == "weight"] == ["twice"]
    torch.testing.assert_close(program.run([torch.ones(2, 8)]), torch.full((2, 8), 6.0))
