"""What OpenVINO's pieces compute, in both layouts, and what they don't."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("openvino", reason="the package openvino is not installed")

from openvino_pieces import HIDDEN, OPS, context, floats, inputs, integers, piece_of
from programs import options
from two_threads import two_threads as two_threads

from piecework import ops
from piecework.compile.base import CompileError, NotForCompilerError
from piecework.compile.openvino import settings
from piecework.compile.openvino.compiler import OpenVinoCompiler
from piecework.compile.openvino.convert import CONVERTERS
from piecework.compile.openvino.settings import Layout
from piecework.devices import make_device
from piecework.errors import DeviceError
from piecework.graph.build import build

LAYOUTS = [Layout("constants", "open"), Layout("inputs", "open"), Layout("inputs", "fixed")]
HOST = {
    "attention",
    "paged_attention",
    "paged_attention_int8",
    "linear_blocks",
    "linear_block_parts",
    "embedding_blocks",
    "linear_coded",
    "embedding_coded",
    "all_reduce",
}
"""Ops that fill holes, sum over processes, or take weights in forms of the CPU: such pieces run there."""


def compare(found: Any, wanted: Any, tolerance: float) -> None:
    """Results that are memory for others hold nothing to compare."""
    for got, expected in zip(found, wanted, strict=True):
        assert got.shape == expected.shape and got.dtype is expected.dtype
        if got.dtype is torch.int8:  # a value between two integers may go either way
            assert (got.int() - expected.int()).abs().max() <= 1
        else:
            torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [(LAYOUTS[0], torch.float32), (LAYOUTS[2], torch.float32)]
    + [pytest.param(LAYOUTS[0], d, marks=pytest.mark.slow) for d in (torch.bfloat16, torch.float16)]
    + [pytest.param(LAYOUTS[1], d, marks=pytest.mark.slow) for d in (torch.float32, torch.bfloat16)],
)
def test_ops_on_floats_mean_what_their_references_do(layout: Layout, dtype: torch.dtype) -> None:
    fn, weights = floats(dtype)
    piece = OpenVinoCompiler(layout).compile(
        piece_of(fn, [*inputs(5, dtype), *weights]), context(weights, before=4)
    )
    for tokens in (1, 7, 33):
        given = [*inputs(tokens, dtype), *weights]
        *found, memory, same = piece(given)
        *wanted, _, _ = fn(*given)
        compare(found, wanted, 2e-5 if dtype is torch.float32 else 4e-2)
        assert same is given[3] and memory.shape == same.shape
    assert piece.models == (3 if layout.sizes == "fixed" else 1)


@pytest.mark.parametrize("layout", [LAYOUTS[0], pytest.param(LAYOUTS[2], marks=pytest.mark.slow)])
def test_ops_on_integers_mean_what_their_references_do(layout: Layout) -> None:
    fn, weights = integers()
    given = [inputs(5, torch.float32)[3], *weights]
    piece = OpenVinoCompiler(layout).compile(piece_of(fn, given), context(weights, before=1))
    for tokens in (1, 7, 33):
        given[0] = inputs(tokens, torch.float32)[3]
        given[0][tokens // 2, :3] *= 100
        compare(piece(given), fn(*given), 1e-2)
    given[0][3, 1], given[0][4, 1] = float("nan"), float("inf")
    scales = piece(given)[1]
    assert scales.isfinite().flatten().tolist() == [i not in (3, 4) for i in range(33)]


def test_no_named_op_is_forgotten() -> None:
    names = {name.removeprefix("piecework::") for name in CONVERTERS if name.startswith("piecework::")}
    assert names == {name for name in ops.names() if name != "order_probe"} - HOST  # a test's own op
    seen = set()
    for (fn, weights), first in ((floats(torch.float32), 0), (integers(), 3)):
        graph = piece_of(fn, [*inputs(5, torch.float32)[first:], *weights]).graph
        seen |= {n.target._opname for n in graph.nodes if getattr(n.target, "namespace", "") == "piecework"}
    assert seen == names


def test_an_unknown_op_is_named_and_its_piece_runs_on_the_host(caplog: pytest.LogCaptureFixture) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(x * 2, -1)

    with pytest.raises(NotForCompilerError, match="openvino: aten::cumsum has no converter"):
        OpenVinoCompiler().compile(piece_of(fn, [torch.ones(5, 4)]), context())
    made = options("openvino")
    made.device = make_device("openvino:CPU")
    with caplog.at_level(logging.WARNING, logger="piecework.compile"):
        program = build(fn, ["x"], [torch.ones(5, 4)], made)
    assert "aten::cumsum has no converter; the piece runs uncompiled" in caplog.text
    assert [r.compiler for r in program.records] == ["eager"] and made.counters.compile_failures == 1
    x = torch.randn(3, 4)
    torch.testing.assert_close(program.run([x]), fn(x))


def test_results_are_written_where_they_are_wanted() -> None:
    weight = torch.randn(6, HIDDEN)
    piece = OpenVinoCompiler().compile(
        piece_of(OPS.linear, [torch.ones(5, HIDDEN), weight]), context([weight], before=1)
    )
    x, wanted = torch.randn(3, HIDDEN), torch.full((3, 6), 7.0)
    place = wanted.data_ptr()
    (found,) = piece([x, weight], [wanted])
    assert piece.direct and found is wanted and found.data_ptr() == place
    torch.testing.assert_close(found, x @ weight.T)
    (made,) = piece([torch.randn(HIDDEN, 3).t(), weight])
    assert made is not wanted and torch.equal(found, wanted)
    other = torch.randn(3, 12)[:, ::2]
    (copied,) = piece([x, weight], [other])
    torch.testing.assert_close(copied, wanted)


def test_weights_that_no_call_has_are_compiled_later_and_counted() -> None:
    weight, another, third = torch.randn(3, 6, HIDDEN)
    told = context([weight], before=1)
    piece = OpenVinoCompiler(LAYOUTS[0]).compile(piece_of(OPS.linear, [torch.ones(5, HIDDEN), weight]), told)
    x = torch.randn(3, HIDDEN)
    for w, recompiles in ((weight, 0), (another, 1), (weight, 1), (third, 1)):
        torch.testing.assert_close(piece([x, w])[0], x @ w.T)
        assert told.counters.recompiles == recompiles
    assert piece.models == 2


@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_a_second_start_reads_the_blob(layout: Layout, tmp_path: Path, caplog: Any) -> None:
    weight = torch.randn(6, HIDDEN)
    graph = piece_of(OPS.linear, [torch.ones(5, HIDDEN), weight])
    x = torch.randn(3, HIDDEN)

    def start(weight: torch.Tensor = weight, device: str = "openvino:CPU") -> bool:
        told = context([weight], before=1, device=make_device(device), cache_dir=tmp_path)
        piece = OpenVinoCompiler(layout).compile(graph, told)
        torch.testing.assert_close(piece([x, weight])[0], x @ weight.T)
        assert told.counters.cache_hits == int(told.cached)
        return told.cached

    assert [start(), start()] == [False, True]
    assert start(device="openvino:CPU:INFERENCE_NUM_THREADS=1") is False
    assert start(weight + 1) is (layout.weights == "inputs")  # a constant is part of the blob
    for blob in (tmp_path / "openvino").glob("*.bin"):
        blob.write_bytes(blob.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING, logger="piecework.compile"):
        assert start() is False
    assert "changed or cut short; the piece is compiled again" in caplog.text
    assert start() is True


def test_what_a_device_says_of_a_failure_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    import openvino

    weight = torch.randn(6, HIDDEN)
    graph = piece_of(OPS.linear, [torch.ones(5, HIDDEN), weight])
    with pytest.raises(CompileError, match=r"openvino failed: Could not read number of streams"):
        OpenVinoCompiler().compile(graph, context(device=make_device("openvino:CPU:NUM_STREAMS=many")))
    piece = OpenVinoCompiler().compile(graph, context())

    def fail(self: Any, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("Exception from src/x.cpp:7:\nthe device is lost")

    monkeypatch.setattr(openvino.InferRequest, "infer", fail)
    with pytest.raises(DeviceError, match="device openvino:CPU failed at run: the device is lost"):
        piece([torch.ones(3, HIDDEN), weight])


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ((torch.bfloat16,), "bf16"),
        ((torch.bfloat16, torch.int8), "bf16"),
        ((torch.bfloat16, torch.float32), "f32"),
    ],
)
def test_a_piece_with_a_result_in_float32_is_computed_in_it(
    results: tuple[torch.dtype, ...], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "capabilities", lambda target: {"FP32", "BF16"})
    graph = piece_of(lambda x: tuple(x.to(dtype) for dtype in results), [torch.ones(5, HIDDEN)])
    assert settings.properties(graph, context())["INFERENCE_PRECISION_HINT"] == expected


def test_hints_reach_the_model() -> None:
    graph = piece_of(OPS.linear, [torch.ones(5, HIDDEN), torch.ones(6, HIDDEN)])
    device = make_device("openvino:CPU:PERF_COUNT=YES")
    piece = OpenVinoCompiler(Layout("inputs", "open")).compile(graph, context(device=device))
    (model,) = piece._models.values()
    got = {
        name: model.compiled.get_property(name)
        for name in ("PERF_COUNT", "INFERENCE_PRECISION_HINT", "DYNAMIC_QUANTIZATION_GROUP_SIZE")
    }
    assert [str(got["PERF_COUNT"]), got["DYNAMIC_QUANTIZATION_GROUP_SIZE"]] == ["YES", 0]
    assert "f32" in str(got["INFERENCE_PRECISION_HINT"]) or "float32" in str(got["INFERENCE_PRECISION_HINT"])
    assert "FullyConnected" in piece.source or "MatMul" in piece.source
