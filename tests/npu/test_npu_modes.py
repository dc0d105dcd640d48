"""The device `npu` on the stand-in for torch_npu: each graph mode gives the tokens of the eager engine."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tiny import save_tiny

from piecework import LLM
from piecework.engine.result import Result
from piecework.errors import ModelError
from piecework.graph.counters import Counters
from piecework.weights.source import resolve

SIZES = [1, 2, 4]
NEAR_TIE = 2e-3


@dataclass(frozen=True)
class Mode:
    """How programs run on the NPU, and how many graphs that takes for L layers."""

    decode: str
    prefill: str
    compiler: str = "eager"

    def settings(self) -> dict[str, Any]:
        """Keyword arguments of LLM."""
        config: dict[str, Any] = {
            "compiler": self.compiler,
            "decode_graph": self.decode,
            "prefill_graph": self.prefill,
            "strict": False,
        }
        if self.decode != "eager":
            config["decode_capture_sizes"] = SIZES
        if self.prefill != "eager":
            config["prefill_capture_sizes"] = [4, 16, 48]
        return {"device": "npu", "page_size": 128, "compilation_config": config}

    def captures(self, layers: int) -> int:
        """Graphs of the body: sizes for a full decode, a graph per piece and size for pieces."""
        sizes = {*(SIZES if self.decode == "piecewise" else ()), *([4, 16, 48] if self.prefill != "eager" else ())}
        return len(sizes) * (layers + 1) + (len(SIZES) if self.decode == "full" else 0)


MODES = [
    Mode("full", "piecewise"),
    Mode("piecewise", "piecewise"),
    Mode("full", "eager"),
    Mode("eager", "eager"),
    Mode("full", "piecewise", "dynamo:eager"),
]


def prompts(vocabulary: int) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(vocabulary) for _ in range(n)] for n in (7, 16, 1, 40, 33, 90)]


def run(
    model: str, settings: dict[str, Any], vocabulary: int, max_tokens: int, **options: Any
) -> tuple[list[Result], Counters, int]:
    """Greedy results for batches that are captured, between two sizes, and above the largest."""
    with LLM(
        model,
        dtype="float32",
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=192,
        kv_cache_memory=2**25,
        **settings,
        **options,
    ) as llm:
        results = [
            result
            for batch in (1, 3, 6)
            for result in llm.generate(
                prompts(vocabulary)[:batch],
                temperature=0.0,
                max_tokens=max_tokens,
                ignore_eos=True,
                logprobs=2,
            )
        ]
        return results, llm.service.runner.programs.counters, llm.service.model_config.num_layers


def check_equal(expected: list[Result], found: list[Result]) -> None:
    """Same tokens, but for flips at near ties."""
    flips = 0
    for want, got in zip(expected, found, strict=True):
        assert got.finish_reason == "length", got.error
        for entry, token in zip(want.logprobs, got.token_ids, strict=True):
            if entry.token_id != token:
                assert entry.top[0][1] - entry.top[1][1] < NEAR_TIE
                flips += 1
                break
    assert flips <= len(found) // 4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {
        name: str(save_tiny(tmp_path_factory.mktemp(name), name, num_hidden_layers=2))
        for name in ("qwen3", "qwen3_moe")
    }


@pytest.fixture(scope="module")
def expected(models: dict[str, str]) -> dict[tuple[str, str], list[Result]]:
    made = {}
    for name, quantization in (("qwen3", "auto"), ("qwen3_moe", "auto"), ("qwen3", "w8a8-dynamic")):
        options = {"quantization": quantization}
        made[name, quantization], _, _ = run(models[name], {"device": "cpu"}, 320, 10, **options)
    return made


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(
    ("name", "quantization"), [("qwen3", "auto"), ("qwen3_moe", "auto"), ("qwen3", "w8a8-dynamic")]
)
def test_tokens_are_those_of_the_eager_engine(
    mode: Mode, name: str, quantization: str, models: Any, expected: Any, twin: Any, float32: None
) -> None:
    found, counters, layers = run(models[name], mode.settings(), 320, 10, quantization=quantization)
    check_equal(expected[name, quantization], found)
    assert counters.captures == mode.captures(layers)
    assert (counters.replays > 0) == (mode.captures(layers) > 0)
    assert (counters.pieces, counters.holes) == (layers + 1, layers)
    assert counters.recompiles == counters.compile_failures == 0
    assert "npu_fused_infer_attention_score" in twin.called
