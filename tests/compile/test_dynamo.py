"""Backends of torch.compile as compilers of pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from programs import inputs_of, program_of, random_model
from torch._dynamo.backends import registry
from torch._dynamo.backends.registry import register_backend

from piecework.compile.base import CompileError

calls: list[list[torch.Tensor]] = []


@register_backend
def piecework_test_backend(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    calls.append(inputs)
    return gm.forward


@register_backend
def piecework_test_specialising(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    assert all(x.shape[0] != 7 for x in inputs)
    return gm.forward


@pytest.mark.parametrize("backend", ["piecework_test_backend", "aot_eager"])
def test_backend_is_called_once_a_piece_for_all_sizes(backend: str) -> None:
    calls.clear()
    model = random_model("llama", 3)
    program, made = program_of(model, f"dynamo:{backend}", strict=True)
    for count in (1, 2, 7, 33):
        inputs = inputs_of(model, count)
        with torch.inference_mode():
            torch.testing.assert_close(program.run(inputs), model(*inputs), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(program.run(inputs), model(*inputs), rtol=1e-4, atol=1e-4)
    assert len(calls) == (3 if backend == "piecework_test_backend" else 0)
    assert (made.counters.compiles, made.counters.recompiles) == (3, 0)


def test_a_backend_that_decides_by_the_token_count_is_found_out() -> None:
    model = random_model("llama", 2)
    with pytest.raises(CompileError, match=r"number of tokens: .*7"):
        program_of(model, "dynamo:piecework_test_specialising", strict=True)
    program, made = program_of(model, "dynamo:piecework_test_specialising")
    assert made.counters.compile_failures == 3
    inputs = inputs_of(model, 7)
    torch.testing.assert_close(program.run(inputs), model(*inputs), rtol=1e-5, atol=1e-5)


WRONG: list[tuple[Callable[[Any], Any] | None, str]] = [
    (lambda results: results[0], r"its code gives a Tensor and not \(\["),
    (lambda results: None, r"its code gives None and not \(\["),
    (lambda results: results[:-1], r"its code gives \(.*\) and not \(\["),
    (lambda results: [r[:1] for r in results], r"its code gives \(\[1, .*\) and not \(\[3, "),
    (lambda results: [r.double() for r in results], "its code gives .*float64.* and not "),
    (lambda results: results[99], "its code fails at the first call: IndexError"),
    (None, "it gave None and no function"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_what_a_backend_makes_is_looked_at_once_before_it_runs(
    change: Callable[[Any], Any] | None, message: str
) -> None:
    def backend(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any] | None:
        return None if change is None else lambda *given: change(gm.forward(*given))

    register_backend(backend, name="piecework_test_wrong")
    try:
        model = random_model("llama", 2)
        with pytest.raises(CompileError, match="dynamo:piecework_test_wrong failed: " + message):
            program_of(model, "dynamo:piecework_test_wrong", strict=True)
        program, made = program_of(model, "dynamo:piecework_test_wrong")
    finally:
        for known in (registry._BACKENDS, registry._COMPILER_FNS):
            known.pop("piecework_test_wrong", None)  # type: ignore[attr-defined]
    assert made.counters.compile_failures == 3
    inputs = inputs_of(model, 5)
    torch.testing.assert_close(program.run(inputs), model(*inputs), rtol=1e-5, atol=1e-5)
