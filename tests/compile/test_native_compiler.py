"""What becomes a native piece, what doesn't and who is told, and that no wrong input passes."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from native_models import both_programs, native_model, native_options
from programs import inputs_of, random_model
from torch import Tensor

from piecework.compile.base import CompileContext, CompileError
from piecework.compile.native import NativeCompiler
from piecework.compile.native_piece import InputError, NativePiece
from piecework.compile.plan import read_plan, spell_plan
from piecework.compile.registry import make_compiler
from piecework.devices import make_device
from piecework.errors import ConfigError
from piecework.graph.build import build_program
from piecework.graph.trace import trace
from piecework.native import library

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
OPS = torch.ops.piecework


def compiled(fn: Callable[..., Any], *examples: Tensor) -> NativePiece:
    """The piece that a function of tensors with 5 tokens is."""
    return NativeCompiler().compile(trace(fn, examples).graph_module, CompileContext(make_device("cpu")))


def norm(x: Tensor, weight: Tensor) -> Any:
    return OPS.rms_norm(x, weight, 1e-5)


def test_a_plan_reads_as_text() -> None:
    piece = compiled(lambda x, w: norm(norm(x, w), w), torch.ones(5, 4), torch.ones(4))
    first, second = [line for line in piece.source.splitlines() if line.startswith("rms_norm")]
    assert "x=i0, weight=i1, out=@[0], rows=T, size=4" in first and "eps=1e-05" in first
    assert "x=@[0], weight=i1, out=o0" in second


def test_inputs_and_views_may_be_results() -> None:
    def fn(x: Tensor, w: Tensor) -> Any:
        y = norm(x, w)
        return x, y, y[:, 4:], y.view(-1, 2, 4), x[:, :4]

    piece = compiled(fn, torch.ones(5, 8), torch.ones(8))
    weight = torch.rand(8)
    for tokens in (1, 3):
        whole = torch.randn(tokens + 1, 8)
        x = whole[1:]  # its memory begins before it
        found = piece([x, weight])
        assert found[0] is x
        for got, wanted in zip(found, fn(x, weight), strict=True):
            assert torch.equal(got, wanted) and got.stride() == wanted.stride()
        assert found[2].untyped_storage().data_ptr() == found[1].data_ptr()


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (lambda x, w: norm(x + 1, w), r"aten\.add\.Tensor"),
        (lambda x, w: norm(x, w).sum(), r"aten\.sum"),
        (lambda x, w: norm(torch.zeros_like(x), w), r"aten\.(zeros_like|full)"),
        (lambda x, w: norm(x.clone(), w), r"aten\.clone"),
        (lambda x, w: norm(x.view(-1, 2, 4).transpose(0, 1), w[:4]), "piecework::rms_norm depends on"),
        (lambda x, w: norm(x, w).view(2, -1), "a tensor of sizes"),
        (lambda x, w: (y := norm(x, w), y.view(torch.int32)), "some other part of a tensor"),
    ],
    ids=["addition", "sum", "zeros", "copy", "by call", "tokens not first", "bits"],
)
def test_what_is_no_call_of_a_kernel_is_named(fn: Callable[..., Any], said: str) -> None:
    with pytest.raises(CompileError, match=said):
        compiled(fn, torch.ones(5, 8), torch.ones(8))


def test_inputs_with_other_strides_are_copied_and_wrong_ones_refused() -> None:
    piece = compiled(norm, torch.ones(5, 8), torch.ones(8))
    wide, weight = torch.randn(6, 20), torch.rand(8)
    for x in (wide[:, 3:11], wide[:1, 3:11], wide[::2, :8], torch.randn(8, 3).t()):
        assert torch.equal(piece([x, weight])[0], norm(x.contiguous(), weight))
    for bad in (torch.randn(3, 7), torch.randn(3, 8).double(), torch.randn(3, 8).half()):
        with pytest.raises(InputError, match=r"input 0 of a piece must be float32 \[T, 8\]"):
            piece([bad, weight])
    for bad in (torch.rand(16)[::2], torch.rand(9), torch.rand(8).bfloat16()):
        with pytest.raises(InputError, match=r"input 1 of a piece must be float32 \[8\]"):
            piece([torch.randn(3, 8), bad])


def test_layers_share_a_piece() -> None:
    piece = compiled(norm, torch.ones(5, 8), torch.ones(8))
    x = torch.randn(4, 8)
    for weight in torch.rand(5000, 8):  # more than it remembers
        assert torch.equal(piece([x, weight])[0], norm(x, weight))


def test_experts_fall_back_to_eager_pieces(caplog: pytest.LogCaptureFixture) -> None:
    model = random_model("qwen3_moe")
    settings = native_options(model, "native")
    with caplog.at_level(logging.WARNING, logger="piecework.compile"):
        program = build_program(model, settings)
    compilers = [record.compiler for record in program.records]
    assert compilers.count("native") >= 1 and compilers.count("eager") >= 1
    failed = [record for record in program.records if record.failure]
    assert [record.compiler for record in failed] == ["eager"] * compilers.count("eager")
    assert settings.counters.compile_failures == len(failed)
    for record in failed:
        assert record.failure is not None and record.failure.startswith("piecework::moe (aten.")
        (line,) = [r.message for r in caplog.records if record.key[:12] in r.message]
        assert line.startswith("not a piece for the compiler native: piecework::moe")
    inputs = inputs_of(model, 7)
    expected = build_program(model, native_options(model, "eager")).run(inputs)
    assert torch.equal(program.run(inputs), expected)


def test_strict_refuses_them_where_somebody_asked_for_native(caplog: pytest.LogCaptureFixture) -> None:
    model = random_model("qwen3_moe")
    with caplog.at_level(logging.INFO, logger="piecework.compile"):
        program = build_program(model, native_options(model, "auto", strict=True))
    assert {record.compiler for record in program.records} == {"native", "eager"}
    levels = [r.levelname for r in caplog.records if "piecework::moe" in r.message]
    assert set(levels) == {"INFO"} and len(levels) == sum(r.failure is not None for r in program.records)
    with pytest.raises(CompileError, match="native: piecework::moe"):
        build_program(model, native_options(model, "native", strict=True))
    model = native_model("llama", torch.float32)
    assert build_program(model, native_options(model, "native", strict=True)).num_distinct == 3


def test_without_the_library_it_says_so_and_auto_takes_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_device("cpu").default_compiler() == "native"
    monkeypatch.setattr("piecework.compile.native.library", lambda: None)
    monkeypatch.setattr("piecework.devices.cpu.library", lambda: None)
    with pytest.raises(ConfigError, match=r"compiler='native'.*kernels can't be built"):
        make_compiler("native")
    assert make_device("cpu").default_compiler() == "eager"


def test_a_plan_is_read_as_it_was_written() -> None:
    model, eager, native = both_programs("qwen3", torch.bfloat16)
    for piece in native.pieces:
        assert isinstance(piece, NativePiece)
        written = json.loads(json.dumps(spell_plan(piece.plan)))
        assert read_plan(written) == piece.plan
    assert not any(isinstance(piece, NativePiece) for piece in eager.pieces)
    assert model.config.num_layers == 2


@pytest.mark.parametrize("damage", ["kernel", "fields", "buffer", "result", "dtype", "tokens"])
def test_a_damaged_plan_is_refused(damage: str) -> None:
    plan = spell_plan(compiled(norm, torch.ones(5, 8), torch.ones(8)).plan)
    plan = json.loads(json.dumps(plan))
    if damage == "kernel":
        plan["calls"][0][0] = "no_such_kernel"
    elif damage == "fields":
        plan["calls"][0][1].pop()
    elif damage == "buffer":
        plan["calls"][0][1][0][0] = 9
    elif damage == "result":
        plan["results"][0][0] = 3
    elif damage == "dtype":
        plan["inputs"][0][2] = "Tensor"
    else:
        plan["tokens"] = 5
    with pytest.raises((ValueError, LookupError, AttributeError)):
        read_plan(plan)
