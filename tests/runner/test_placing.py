"""Pieces run where a user puts them, and nothing else moves."""

from __future__ import annotations

import pytest
import torch
from programs import inputs_of, options, random_model

from piecework.compile.eager import EagerCompiler
from piecework.devices import make_device
from piecework.errors import ConfigError
from piecework.graph.build import build_head_program, build_program
from piecework.runner.placing import PlacedPiece, PlacingCompiler, check_placed, read_places

MODEL = random_model("llama")
INPUTS = inputs_of(MODEL, 5)


def build(text, make=build_program):
    chosen = options()
    chosen.device = make_device("sim")
    chosen.compiler = PlacingCompiler(EagerCompiler(), read_places(text, torch.float32))
    return make(MODEL, chosen), chosen.counters


def test_pieces_run_where_they_were_put_and_the_result_is_the_same():
    plain = build_program(MODEL, options())
    program, counters = build("1:cpu, last:sim:host")
    assert [piece.compiler for piece in program.pieces] == [
        "eager",
        "eager on cpu (placed)",
        "eager on sim (placed)",
    ]
    assert [isinstance(piece, PlacedPiece) for piece in program.pieces] == [False, True, True]
    assert (counters.compiles, counters.moved_pieces) == (3, 0)  # nothing failed
    torch.testing.assert_close(program.run(INPUTS), plain.run(INPUTS), rtol=1e-4, atol=1e-4)


def test_the_head_is_a_program_of_its_own():
    head, _ = build("head:cpu", build_head_program)
    assert all(isinstance(piece, PlacedPiece) for piece in head.pieces)


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("", "a number, last or head"),
        ("cpu", "a number, last or head, then a colon and a device; not 'cpu'"),
        ("-1:cpu", "a number, last or head"),
        ("middle:cpu", "not 'middle:cpu'"),
        ("1:cpu,01:sim", "each piece once; 1 is there twice"),
        ("0:cpu,last:toaster", "for piece last one of .*cpu.*; not 'toaster'"),
        ("3:cpu", "place='3:cpu' is not allowed: a piece below 3, or last"),
        ("2:cpu,last:sim", "place='2 and last' is not allowed: each piece once"),
    ],
)
def test_what_cannot_be_placed_is_named(text, allowed):
    with pytest.raises(ConfigError, match=allowed):
        build(text)


def test_a_device_must_run_in_the_models_precision(monkeypatch):
    monkeypatch.setattr(type(make_device("sim")), "supports_dtype", lambda self, dtype: False)
    with pytest.raises(ConfigError, match=r"for piece 0 a device that runs in torch.float32; sim doesn't"):
        read_places("0:sim", torch.float32)


def test_a_model_without_pieces_has_none_to_place():
    places = read_places("0:cpu,head:sim", torch.float32)
    check_placed(places, {"body": None, "head": None})
    with pytest.raises(ConfigError, match=r"place='head:sim' is not allowed: nothing, since .*: no trace"):
        check_placed(places, {"body": None, "head": "no trace"})
