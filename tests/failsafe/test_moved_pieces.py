"""One piece of a model's program fails and moves, with every call of it, and nothing else does."""

from __future__ import annotations

import logging

import pytest
import torch
from programs import inputs_of, options, random_model

from piecework.compile.base import CompileError
from piecework.compile.eager import EagerCompiler
from piecework.devices import make_device
from piecework.devices.injected import read_faults
from piecework.errors import DeviceError
from piecework.failsafe.errors import ExhaustedError
from piecework.failsafe.policy import Policy
from piecework.graph.build import build_program
from piecework.runner.spare import FailsafeCompiler, FailsafePiece, Spares

MODEL = random_model("llama", layers=5)  # six pieces: first, four in the middle that are one, last
INPUTS = inputs_of(MODEL, 7)


class Counting(EagerCompiler):
    """Notes the place of every piece that it compiles."""

    def __init__(self):
        self.compiled = []

    def compile(self, piece, context):
        self.compiled.append(context.index)
        return super().compile(piece, context)


def build(faults="", *, policy="full", at_run=True, compiler=None):
    """The program on a `sim` with a `cpu` behind it, its counters, and what was launched."""
    planned = read_faults(faults, 2)
    sim, cpu = (
        make_device(name, [fault for fault in planned if fault.device == place])
        for place, name in enumerate(("sim", "cpu"))
    )
    chosen = options()
    chosen.device = sim
    chosen.compiler = FailsafeCompiler(
        compiler or EagerCompiler(), Spares(("cpu",), lambda name: cpu), Policy(policy), at_run
    )
    return build_program(MODEL, chosen), chosen.counters


def run(program, step=0):
    """One step, and the distinct pieces that it launched, in order."""
    launched, launch = [], program.device.launch

    def noted(piece, inputs, outputs=None):
        launched.append(program.pieces.index(piece))
        return launch(piece, inputs, outputs)

    program.device.notify("step", step)
    program.device.launch = noted
    try:
        return program.run(INPUTS), launched
    finally:
        program.device.launch = launch


@pytest.fixture(scope="module")
def expected():
    return run(build()[0])[0]


def test_a_piece_that_does_not_compile_is_compiled_on_the_next_device(expected, caplog):
    compiler = Counting()
    program, counters = build("point=compile,piece=1", compiler=compiler, at_run=False)
    assert compiler.compiled == [0, 2]  # and the one that failed, on the other device only
    assert [isinstance(piece, FailsafePiece) for piece in program.pieces] == [False, True, False]
    assert [piece.compiler for piece in program.pieces] == ["eager", "eager on cpu", "eager"]
    assert (counters.compiles, counters.moved_pieces, counters.compile_failures) == (3, 1, 0)
    assert program.records[1].failure == "sim failed at compile: planned fault at compile 1"
    (told,) = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert told.startswith("piece 1 (key ") and "cpu took over" in told
    hidden, launched = run(program)
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4)
    assert launched == [0, 1, 1, 1, 1, 2]


def test_a_piece_that_fails_in_a_step_moves_with_all_its_calls(expected, caplog):
    program, counters = build("point=run,step=3,piece=2")
    for step in range(3):
        run(program, step)
    assert counters.moved_pieces == counters.recompiles == 0 and not any(
        piece.moved for piece in program.pieces
    )
    hidden, launched = run(program, 3)
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4)
    assert launched == [0, 1, 1, 1, 1, 2]  # nothing before it ran again, nothing was launched twice
    assert [piece.moved for piece in program.pieces] == [False, True, False]
    assert (counters.compiles, counters.moved_pieces, counters.recompiles) == (3, 1, 1)
    hidden, launched = run(program, 4)
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4)
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1


def test_without_failure_and_without_runs_to_guard_nothing_is_wrapped():
    assert not any(isinstance(piece, FailsafePiece) for piece in build(at_run=False)[0].pieces)
    assert all(isinstance(piece, FailsafePiece) and not piece.moved for piece in build()[0].pieces)


def test_a_piece_that_fails_everywhere_says_where():
    with pytest.raises(ExhaustedError, match=r"sim at compile .*planned.*; cpu at compile .*planned"):
        build("point=compile,piece=2; point=compile,piece=2,device=1")
    program, _ = build("point=run,step=0,piece=1; point=compile,piece=1,device=1")
    with pytest.raises(ExhaustedError, match=r"sim at run .*planned.*; cpu at compile .*planned"):
        run(program)


def test_a_fault_of_the_whole_step_is_none_of_a_piece():
    program, _ = build("point=run,step=0")
    with pytest.raises(DeviceError, match="planned fault at step 0"):
        run(program)


def test_a_piece_that_is_none_for_its_compiler_stays_and_runs_uncompiled(expected):
    class Picky(EagerCompiler):
        name = "picky"

        def compile(self, piece, context):
            if context.index == 1:
                raise CompileError(self.name, "not mine")
            return super().compile(piece, context)

    program, counters = build(compiler=Picky(), at_run=False)
    assert (counters.compile_failures, counters.moved_pieces) == (1, 0)
    torch.testing.assert_close(run(program)[0], expected, rtol=1e-5, atol=1e-5)
