"""The engine over native pieces: the reference's tokens, and a second start that reads the plans."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from reference import compare_greedy, load_reference
from tiny import save_tiny

from piecework import LLM
from piecework.compile.native_piece import NativePiece
from piecework.graph.program import Program
from piecework.native import library

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
PROMPTS = [[5, 9, 200], [17] * 21, [3, 4, 5, 6, 7, 8, 9]]


def answer(folder: Path, cache: Path, **settings: Any) -> tuple[list[list[int]], list[Program]]:
    """Greedy tokens, and the programs of body and head."""
    compilation = {"compile_cache_dir": str(cache), **settings.pop("compilation", {})}
    with LLM(str(folder), dtype="float32", compilation_config=compilation, **settings) as llm:
        found = llm.generate(PROMPTS, temperature=0.0, max_tokens=24, ignore_eos=True)
        programs = llm.service.runner.programs
        native = all(isinstance(piece, NativePiece) for piece in programs.body.pieces)
        counters = programs.counters
        assert counters.chained_runs == (counters.eager_runs if native else 0) and counters.eager_runs > 0
        return [list(result.token_ids) for result in found], [programs.body, programs.head]


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe"])
def test_tokens_are_those_of_the_reference(name: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", name)
    tokens, programs = answer(folder, tmp_path / "cache", compilation={"compiler": "native"})
    compilers = [record.compiler for program in programs for record in program.records]
    assert set(compilers) == ({"native", "eager"} if name == "qwen3_moe" else {"native"})
    compared = compare_greedy(load_reference(folder), PROMPTS, tokens)
    assert compared.wrong == [] and compared.compared >= 60
    again, _ = answer(folder, tmp_path / "cache", compilation={"compiler": "eager"})
    assert again == tokens


@pytest.mark.parametrize(
    ("name", "compilation", "level"),
    [("qwen3", {}, None), ("qwen3_moe", {}, "INFO"), ("qwen3_moe", {"compiler": "native"}, "WARNING")],
)
def test_a_second_start_reads_the_plans(
    name: str,
    compilation: dict[str, str],
    level: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = save_tiny(tmp_path / "model", name)
    cache = tmp_path / "cache"
    starts = []
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="piecework.compile"):
            tokens, programs = answer(folder, cache, compilation=compilation)
        said = sorted((r.levelname, r.message) for r in caplog.records if "not a piece" in r.message)
        records = [(r.key, r.compiler, r.failure) for p in programs for r in p.records]
        sources = [piece.source for p in programs for piece in p.pieces]
        starts.append((tokens, records, sources, said))
    assert starts[0] == starts[1]
    assert {found for found, _ in said} == ({level} if level else set())
    kept = [json.loads(path.read_text())["content"] for path in (cache / "programs").glob("*.json")]
    assert len(kept) == 2
    assert all("plan" in piece or said for content in kept for piece in content["pieces"])
    assert [record.cached for program in programs for record in program.records] == [True] * len(records)


CROWDED = [[3 + i, 50 + i, *range(100, 100 + 7 * i)] for i in range(8)]


@pytest.mark.parametrize("name", ["mistral", "qwen3"])
def test_steps_are_one_call_under_preemption_and_with_chunks(name: str, tmp_path: Path) -> None:
    """Few pages, small chunks, prompt log probabilities: the same numbers as piece by piece."""
    folder = save_tiny(tmp_path / "model", name)
    small = {"page_size": 4, "num_pages": 40, "max_num_seqs": 8, "chunk_size": 5, "max_model_len": 120}
    found = []
    for chain in (True, False):
        compilation = {
            "compile_cache_dir": str(tmp_path / "cache"),
            "chain": chain,
            "enable_debug_mode": chain,
        }
        with LLM(str(folder), dtype="bfloat16", compilation_config=compilation, **small) as llm:
            results = llm.generate(
                CROWDED, temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1, prompt_logprobs=1
            )
            counters = llm.service.runner.programs.counters
            preemptions = llm.service.stats().preemptions_total
        assert counters.chained_runs == (counters.eager_runs if chain else 0) and counters.eager_runs > 24
        assert preemptions > 0
        found.append([(r.token_ids, r.logprobs, r.prompt_logprobs) for r in results])
    assert found[0] == found[1]
