"""Runs an engine on the device `npu`, and compares its tokens with those of another one."""

from __future__ import annotations

from typing import Any

from shrinking_batches import generate

from piecework import LLM
from piecework.engine.result import Result
from piecework.graph.counters import Counters

VOCABULARY = 320
"""Of the tiny models."""
DEFAULT_VOCABULARY = 49152
"""Of the default model."""
NEAR_TIE = 2e-3


def run(
    model: str, settings: dict[str, Any], vocabulary: int, max_tokens: int = 8
) -> tuple[list[Result], Counters, int]:
    """Greedy results of some batches, the counters of the body, and the number of layers."""
    with LLM(
        model,
        workers="inline",  # a process of its own would look for the real torch_npu
        dtype="float32",
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=192,
        kv_cache_memory=2**25,
        **settings,
    ) as llm:
        results = generate(llm, vocabulary, max_tokens, logprobs=2)
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
