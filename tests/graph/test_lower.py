"""Which implementation a named op gets, and what a compiler sees in its place."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from programs import program_of, random_model
from torch import Tensor

from piecework import ops
from piecework.graph.fold import structure
from piecework.graph.lower import choose, direct, inline, named_op
from piecework.graph.symbols import assumptions, new_fake_mode, new_symbol, symbolic_sizes
from piecework.graph.trace import trace
from piecework.native import library

ORDER = ("reference",)


def _middle(name: str) -> torch.fx.GraphModule:
    program, _ = program_of(random_model(name, 3))
    return program.distinct_graphs[1]


def _targets(module: torch.fx.GraphModule) -> set[str]:
    return {str(n.target) for n in module.graph.nodes if n.op == "call_function"}


@pytest.fixture
def fast_norm() -> Any:
    """Another implementation of rms_norm, that supports whatever the test says."""
    before = dict(ops.norm.rms_norm.implementations)

    def add(supports: Any = None) -> Any:
        @ops.norm.rms_norm.implement("fast", supports)
        def run(x: Tensor, weight: Tensor, eps: float) -> Tensor:
            return ops.norm.rms_norm.reference(x, weight, eps)

        return run

    yield add
    ops.norm.rms_norm.implementations.clear()
    ops.norm.rms_norm.implementations.update(before)


def test_eager_calls_the_implementation_itself(fast_norm: Any) -> None:
    run = fast_norm()
    graph = _middle("llama").graph
    functions = direct(graph, ("fast", *ORDER))
    norms = [f for node, f in functions.items() if named_op(node.target) is ops.norm.rms_norm]
    assert norms == [run, run]
    linears = [f for node, f in functions.items() if named_op(node.target) is ops.linear.linear]
    assert len(set(linears)) == 1
    assert linears[0] in {i.run for i in ops.linear.linear.candidates(ORDER)}


def test_an_implementation_that_refuses_is_passed_over(fast_norm: Any) -> None:
    fast_norm(lambda x, weight, eps: x.shape[-1] == 1)
    functions = direct(_middle("llama").graph, ("fast", *ORDER))
    assert ops.norm.rms_norm.reference in functions.values()


def test_support_that_depends_on_the_token_count_is_asked_at_each_call(fast_norm: Any) -> None:
    asked: list[int] = []

    def supports(x: Tensor, weight: Tensor, eps: float) -> bool:
        few = x.shape[0] < 4
        if type(x) is Tensor:
            asked.append(x.shape[0])
        return few

    fast_norm(supports)
    mode = new_fake_mode()
    with symbolic_sizes():
        count = new_symbol(mode, "tokens")
        with mode:
            arguments = (torch.empty(count, 8), torch.empty(8), 1e-5)
    assert choose(ops.norm.rms_norm, ("fast", *ORDER), arguments) is None
    assert assumptions(mode) == []
    functions = direct(_middle("llama").graph, ("fast", *ORDER))
    (run, *_) = [f for node, f in functions.items() if named_op(node.target) is ops.norm.rms_norm]
    for rows in (2, 9):
        x, weight = torch.randn(rows, 8), torch.rand(8)
        torch.testing.assert_close(run(x, weight, 1e-5), ops.norm.rms_norm.reference(x, weight, 1e-5))
    assert asked == [2, 9]


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_references_are_written_out(name: str) -> None:
    inlined = inline(_middle(name), ORDER)
    assert not any("piecework" in target for target in _targets(inlined.graph_module))
    assert {"aten.mm.default", "aten.rsqrt.default", "aten.silu.default"} <= _targets(inlined.graph_module)


def test_an_op_with_a_better_implementation_stays_one_call() -> None:
    targets = _targets(inline(_middle("qwen3_moe"), ("cpu", "reference")).graph_module)
    assert "piecework.moe.default" in targets
    plain = _targets(inline(_middle("qwen3_moe"), ORDER).graph_module)
    assert not {t for t in plain if "piecework" in t}
    assert "piecework.moe.default" not in _targets(inline(_middle("qwen3_moe"), ("reference",)).graph_module)


def test_a_cheap_op_is_written_out_though_it_has_a_kernel() -> None:
    norm = ops.norm.rms_norm
    before = dict(norm.implementations)
    piece = _middle("llama")
    try:
        for inlined in (True, False):
            run = norm.implement("cpu", inline=inlined)(lambda x, weight, eps: norm.reference(x, weight, eps))
            targets = _targets(inline(piece, ("cpu", "reference")).graph_module)
            assert ("piecework.rms_norm.default" in targets) is not inlined
            assert ("aten.rsqrt.default" in targets) is inlined
            assert run in direct(piece.graph, ("cpu", "reference")).values()
    finally:
        norm.implementations.clear()
        norm.implementations.update(before)


@pytest.mark.skipif(library() is None, reason="the library can't be built here")
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_the_kernels_of_cheap_ops_run_in_eager_pieces_of_any_size(name: str) -> None:
    piece = _middle(name)
    functions = direct(piece.graph, ("cpu", "reference"))
    kernels = {
        op.name: op.implementations["cpu"].inline
        for node, run in functions.items()
        if (op := named_op(node.target)) is not None and run is op.implementations["cpu"].run
    }
    assert kernels["rms_norm"] and kernels["rotary"]
    assert not kernels["silu_and_mul"] and not kernels["linear"]
    targets = _targets(inline(piece, ("cpu", "reference")).graph_module)
    assert all((f"piecework.{name}.default" in targets) is not inlined for name, inlined in kernels.items())


def test_a_call_that_goes_another_way_than_the_device_is_reported(
    fast_norm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    fast_norm()
    with caplog.at_level(logging.WARNING, logger="piecework.graph"):
        inline(_middle("llama"), ("fast", *ORDER))
    assert "piecework::rms_norm" in caplog.text and "CPU" in caplog.text and "fast" in caplog.text


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe"])
def test_written_out_pieces_give_the_same_for_any_size(name: str) -> None:
    piece = _middle(name)
    inlined = inline(piece, ORDER)
    assert assumptions(inlined.mode) == []
    for count in (1, 3, 17):
        generator = torch.Generator().manual_seed(count)
        values = []
        for node in piece.graph.find_nodes(op="placeholder"):
            fake = node.meta["val"]
            shape = [count if isinstance(s, torch.SymInt) else s for s in fake.shape]
            if fake.dtype.is_floating_point:
                values.append(torch.randn(shape, generator=generator) * 0.3)
            else:
                values.append(torch.arange(count) if shape == [count] else torch.tensor([count]))
        for got, wanted in zip(inlined.graph_module(*values)[:-1], piece(*values)[:-1], strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
            assert count == 1 or got.stride() == wanted.stride()


def test_heads_are_cut_from_a_whole_without_gaps() -> None:
    inlined = inline(_middle("llama"), ORDER)
    for node in inlined.graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        assert node.args[0].meta["val"].is_contiguous()


def test_a_changed_reference_changes_the_structure() -> None:
    piece = _middle("llama")
    before = structure(inline(piece, ORDER).graph_module.graph)
    assert structure(inline(piece, ORDER).graph_module.graph) == before
    norm = ops.norm.rms_norm
    kept, norm.reference = norm.reference, lambda x, weight, eps: kept(x, weight, eps * 2)
    try:
        assert structure(inline(piece, ORDER).graph_module.graph) != before
    finally:
        norm.reference = kept


def test_static_variant_has_no_symbols() -> None:
    inlined = inline(_middle("llama"), ORDER, tokens=1)
    assert all(isinstance(s, int) for x in inlined.inputs for s in x.shape)


def test_trace_of_plain_torch_has_no_named_ops() -> None:
    graph = trace(lambda x: x + 1, [torch.ones(3, 2)]).graph_module.graph
    assert direct(graph, ORDER) == {}
