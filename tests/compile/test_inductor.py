"""Inductor's pieces: one compilation for all sizes, right numbers, a disk cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from programs import inputs_of, program_of, random_model

COUNTS = (1, 2, 7, 33, 451)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pieces")


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
