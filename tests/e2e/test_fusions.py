"""The engine gives the same tokens with fusions and without, in every mode, and its pieces stay as many."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tiny import save_tiny

from piecework import LLM

DECODE, PREFILL = {"decode_capture_sizes": [1, 2, 4]}, {"prefill_capture_sizes": [4, 16, 48]}
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "cpu": ("cpu", {}),
    "sim-piecewise": (
        "sim",
        {"decode_graph": "piecewise", "prefill_graph": "piecewise", **DECODE, **PREFILL},
    ),
    "sim-full": ("sim", {"decode_graph": "full", "prefill_graph": "eager", **DECODE}),
    "inductor": ("cpu", {"compiler": "inductor"}),
}
PROMPTS = [[5, 9, 200], [17] * 21, [3, 4, 5, 6, 7, 8, 9]]
FUSIONS = (
    "split_qkv_rmsnorm_rope",
    "split_qkv_rope",
    "add_rms_norm",
    "add_rms_norm_dynamic_quant",
    "rms_norm_dynamic_quant",
    "silu_mul_dynamic_quant",
)


def run(folder: str, device: str, quantization: str, **settings: Any) -> tuple[list[Any], Any]:
    """Greedy results and the body's counters."""
    with LLM(
        folder,
        device=device,
        dtype="float32",
        quantization=quantization,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=64,
        kv_cache_memory=2**24,
        compilation_config={"compiler": "eager", **settings},
    ) as llm:
        results = llm.generate(PROMPTS, temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
        return results, llm.service.runner.programs.counters


@pytest.fixture(scope="module")
def plain() -> Callable[[str, str], tuple[list[Any], Any]]:
    """Give what the eager engine says without fusions, by folder and quantisation."""
    return cache(lambda folder, quantization: run(folder, "cpu", quantization, passes=["dead_code"]))


def compare(
    folder: str, mode: str, quantization: str, caplog: pytest.LogCaptureFixture, plain: Any
) -> dict[str, int]:
    device, settings = MODES[mode]
    with caplog.at_level(logging.WARNING, logger="piecework.passes"):
        fused, counters = run(folder, device, quantization, verify_passes=True, **settings)
    assert [r for r in caplog.records if r.name == "piecework.passes"] == []
    expected, single = plain(folder, quantization)
    for one, other in zip(fused, expected, strict=True):
        assert one.finish_reason == other.finish_reason == "length"
        for index, (got, wanted) in enumerate(zip(one.token_ids, other.token_ids, strict=True)):
            if got != wanted:
                top = other.logprobs[index].top
                assert top[0][1] - top[1][1] < 1e-3, "only a near tie may fall the other way"
                break
    assert (counters.pieces, counters.holes) == (single.pieces, single.holes)
    assert (counters.pieces, counters.distinct) == (4, 3)
    return {name: n for name in FUSIONS if (n := counters.pass_matches[name])}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("qwen3"), "qwen3"))


@pytest.mark.parametrize("mode", ["cpu", *(pytest.param(m, marks=pytest.mark.slow) for m in list(MODES)[1:])])
def test_float(qwen3: str, mode: str, caplog: pytest.LogCaptureFixture, plain: Any) -> None:
    assert compare(qwen3, mode, "none", caplog, plain) == {"split_qkv_rmsnorm_rope": 3, "add_rms_norm": 6}


@pytest.mark.parametrize(
    "mode", ["sim-full", *(pytest.param(m, marks=pytest.mark.slow) for m in MODES if m != "sim-full")]
)
def test_int8(qwen3: str, mode: str, caplog: pytest.LogCaptureFixture, plain: Any) -> None:
    assert compare(qwen3, mode, "w8a8-dynamic", caplog, plain) == {
        "split_qkv_rmsnorm_rope": 3,
        "add_rms_norm": 1,
        "add_rms_norm_dynamic_quant": 5,
        "rms_norm_dynamic_quant": 1,
        "silu_mul_dynamic_quant": 3,
    }


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["none", "w8a8-dynamic"])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_other_models(
    tmp_path: Path, name: str, quantization: str, caplog: pytest.LogCaptureFixture, plain: Any
) -> None:
    found = compare(str(save_tiny(tmp_path, name)), "sim-full", quantization, caplog, plain)
    assert found["split_qkv_rope"] == 3 and found["add_rms_norm"] == (6 if quantization == "none" else 1)
