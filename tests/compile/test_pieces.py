"""Compiling several pieces: in parallel where the compiler may, and what happens when one fails."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest
import torch
from torch import fx

from piecework.compile.base import CompileContext, CompiledPiece, CompileError
from piecework.compile.eager import EagerCompiler
from piecework.compile.pieces import compile_pieces
from piecework.compile.registry import known_compilers, make_compiler
from piecework.devices import make_device
from piecework.errors import ConfigError
from piecework.graph.trace import trace


class Waiting(EagerCompiler):
    """Compiles as eager does after a wait, as for a C++ compiler; counts how many waited at once.

    In parallel they wait for each other.
    """

    name = "waiting"

    def __init__(self, parallel: bool) -> None:
        self.parallel = parallel
        self.most = 0
        self._now = 0
        self._changed = threading.Condition()

    def compile(self, piece: fx.GraphModule, context: CompileContext) -> CompiledPiece:
        with self._changed:
            self._now += 1
            self.most = max(self.most, self._now)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.most > 1, 20 if self.parallel else 0.01)
            self._now -= 1
        return super().compile(piece, context)


class Failing(EagerCompiler):
    name = "failing"

    def compile(self, piece: fx.GraphModule, context: CompileContext) -> CompiledPiece:
        if context.key == "key 1":
            raise CompileError(self.name, "it does not like ones")
        return super().compile(piece, context)


def _adder(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x + number


def _pieces(count: int) -> tuple[list[fx.GraphModule], list[str]]:
    graphs = [trace(_adder(n), [torch.ones(4)]).graph_module for n in range(count)]
    return graphs, [f"key {n}" for n in range(count)]


@pytest.mark.parametrize("parallel", [True, False])
def test_parallel_where_the_compiler_may(parallel: bool) -> None:
    compiler, context = Waiting(parallel), CompileContext(make_device("cpu"))
    pieces, keys = _pieces(12)
    made, records = compile_pieces(pieces, keys, compiler, context, threads=4)
    assert [record.key for record in records] == keys
    assert (compiler.most > 1) is parallel
    assert context.counters.compiles == 12
    assert [int(piece([torch.zeros(1)])[0]) for piece in made] == list(range(12))


def test_a_piece_whose_compiler_fails_runs_uncompiled(caplog: pytest.LogCaptureFixture) -> None:
    pieces, keys = _pieces(3)
    context = CompileContext(make_device("cpu"))
    with caplog.at_level(logging.WARNING, logger="piecework.compile"):
        made, records = compile_pieces(pieces, keys, Failing(), context)
    assert [record.failure for record in records] == [None, "it does not like ones", None]
    assert "failing failed: it does not like ones" in caplog.text
    assert [piece.compiler for piece in made] == ["failing", "eager", "failing"]
    assert (context.counters.compiles, context.counters.compile_failures) == (2, 1)
    with pytest.raises(CompileError, match="it does not like ones"):
        compile_pieces(pieces, keys, Failing(), CompileContext(make_device("cpu"), strict=True))


def test_unknown_compilers_are_refused_with_the_known_ones() -> None:
    assert known_compilers() == ["eager", "inductor", "native", "openvino", "dynamo:<backend>"]
    with pytest.raises(ConfigError, match="compiler='gcc' is not allowed: one of eager, inductor"):
        make_compiler("gcc")
    with pytest.raises(ConfigError, match=r"dynamo: and one of .*aot_eager"):
        make_compiler("dynamo:nothing")
