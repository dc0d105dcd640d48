"""Inductor's pieces: one compilation for all sizes, right numbers, a disk cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from programs import inputs_of, options, program_of, random_model

from piecework.compile.base import CompileError
from piecework.compile.inductor import InductorCompiler
from piecework.graph.build import build

COUNTS = (1, 2, 7, 33, 451)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pieces")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_compiled_pieces_equal_the_model(name: str, cache: Path) -> None:
    model = random_model(name, 3)
    program, made = program_of(model, "inductor", cache_dir=cache, strict=True)
    assert all(piece.opaque and piece.compiler == "inductor" for piece in program.pieces)
    for count in COUNTS:
        inputs = inputs_of(model, count)
        with torch.inference_mode():
            wanted = model(*inputs)
            torch.testing.assert_close(program.run(inputs), wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(program.run(inputs), wanted, rtol=1e-4, atol=1e-4)
    counted = made.counters
    assert (counted.compiles, counted.compile_failures, counted.recompiles) == (3, 0, 0)


@pytest.mark.slow
def test_work_does_not_grow_with_layers(tmp_path: Path) -> None:
    # What this takes is measured by `piecework bench startup --layers 8,64`.
    for layers in (8, 64):
        program, made = program_of(
            random_model("llama", layers), "inductor", cache_dir=tmp_path / str(layers), strict=True
        )
        assert (made.counters.compiles, made.counters.recompiles) == (3, 0)
        assert len({id(piece) for piece in program.pieces}) == 3


@pytest.mark.slow
def test_artefacts_hold_no_weights(cache: Path) -> None:
    model = random_model("llama", 3)
    with torch.inference_mode():
        program, _ = program_of(model, "inductor", cache_dir=cache, strict=True)
    bound = {b.name: b.tensor for b in program.bindings if b.kind == "weight"}
    parameters = dict(model.named_parameters())
    assert all(bound[n] is parameters[n] for n in bound if n in parameters)
    inputs = inputs_of(model, 4)
    before = program.run(inputs)
    model.model.norm.weight.mul_(2)
    torch.testing.assert_close(program.run(inputs), before * 2)


@pytest.mark.slow
def test_piece_that_excludes_one_token_gets_a_variant_for_it(tmp_path: Path) -> None:
    def gaps(x: torch.Tensor) -> torch.Tensor:
        # Inductor assumes more than one row where rows have gaps between them.
        low, _ = torch.split(x, [32, 32], -1)
        return torch.relu(low.view(-1, 4, 8)) + low.view(-1, 4, 8)

    made = options("inductor", cache_dir=tmp_path, strict=True)
    compiled: list[int | None] = []

    class Noting(InductorCompiler):
        def _variant(self, piece: Any, context: Any, variant: Any) -> Any:
            compiled.append(variant.tokens)
            function, failed = super()._variant(piece, context, variant)
            return function, failed if variant.tokens else ["more than one token"]

    made.compiler = Noting()
    program = build(gaps, ["x"], [torch.ones(5, 64)], made)
    assert compiled == [None, 1]
    for count in (1, 2, 40):
        x = torch.randn(count, 64)
        torch.testing.assert_close(program.run([x]), gaps(x))


@pytest.mark.slow
def test_piece_that_assumes_another_size_runs_uncompiled(tmp_path: Path) -> None:
    class Assuming(InductorCompiler):
        def _variant(self, piece: Any, context: Any, variant: Any) -> Any:
            function, _ = super()._variant(piece, context, variant)
            return function, ["Eq(Mod(tokens, 8), 0)"]

    made = options("inductor", cache_dir=tmp_path)
    made.compiler = Assuming()
    program = build(lambda x: x + 1, ["x"], [torch.ones(5, 64)], made)
    assert [p.compiler for p in program.pieces] == ["eager"] and made.counters.compile_failures == 1
    made.config = made.config.with_changes(strict=True)
    with pytest.raises(CompileError, match="Mod"):
        build(lambda x: x + 1, ["x"], [torch.ones(5, 64)], made)
