"""A native piece gives what the eager piece gives, bit for bit, for every scheme and number of tokens."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from native_models import SCHEMES, both_programs, pairwise
from programs import inputs_of

from piecework.compile.native_piece import NativePiece
from piecework.native import library

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
TOKENS = (1, 2, 7, 33, 300)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check(name: str, dtype: torch.dtype, scheme: str, fused: bool = True) -> None:
    """Run both programs one after the other, the longest batch in between."""
    model, eager, native = both_programs(name, dtype, scheme, fused)
    assert [record.compiler for record in native.records] == ["native"] * 3
    assert all(isinstance(piece, NativePiece) and piece.opaque for piece in native.pieces)
    for tokens in (*TOKENS, 1):
        inputs = inputs_of(model, tokens, seed=tokens)
        expected = eager.run(inputs)
        found = native.run(inputs)
        assert torch.equal(found, expected), tokens
        assert torch.isfinite(expected).all() and expected.float().std() > 0.1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_float_pieces(name: str, dtype: torch.dtype) -> None:
    check(name, dtype, "float")


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_pieces_with_fewer_fusions(name: str) -> None:
    check(name, torch.float32, "float", fused=False)


@pytest.mark.parametrize("scheme", SCHEMES[1:])
def test_quantised_pieces(scheme: str) -> None:
    check("qwen2", torch.bfloat16, scheme)


@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("scheme", "name", "dtype"), pairwise(["llama", "qwen2", "qwen3"]))
def test_all_schemes_models_and_types(scheme: str, name: str, dtype: torch.dtype, fused: bool) -> None:
    check(name, dtype, scheme, fused)


def test_two_threads_run_pieces_at_once() -> None:
    model, eager, native = both_programs("llama", torch.float32)
    wrong: list[int] = []

    def run(tokens: int) -> None:
        inputs = inputs_of(model, tokens)
        expected = eager.run(inputs)
        wrong.extend(tokens for _ in range(30) if not torch.equal(native.run(inputs), expected))

    threads = [threading.Thread(target=run, args=(tokens,)) for tokens in (1, 70, 5, 130)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_results_stay_as_they_are_when_the_piece_runs_again() -> None:
    """None of them lies in the memory that pieces share, and no two of a piece in the same memory."""
    model, _, native = both_programs("llama", torch.float32)
    kept = native.run(inputs_of(model, 9))
    before = kept.clone()
    for tokens in (9, 200, 3):
        native.run(inputs_of(model, tokens, seed=1))
    assert torch.equal(kept, before)
    env = native.environment(inputs_of(model, 9))
    step = native.steps[0]
    results = native.pieces[0](step.gather(env))
    spans = sorted((r.data_ptr(), r.data_ptr() + r.nbytes) for r in results)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_results_are_written_into_given_buffers() -> None:
    model, eager, native = both_programs("llama", torch.float32)
    env = native.environment(inputs_of(model, 5))
    expected = eager.pieces[0](eager.steps[0].gather(eager.environment(inputs_of(model, 5))))
    outputs = [torch.empty_like(r) for r in expected]
    found = native.pieces[0](native.steps[0].gather(env), outputs)
    assert all(a is b for a, b in zip(found, outputs, strict=True))
    assert all(torch.equal(a, b) for a, b in list(zip(outputs, expected, strict=True))[:4])
