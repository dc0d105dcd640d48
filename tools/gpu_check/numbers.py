"""Greedy tokens on the device, in every graph mode, against the CPU without graphs."""

from __future__ import annotations

import random
from typing import Any

from piecework.config import EngineConfig
from piecework.engine.offline import run_requests
from piecework.engine.service import Service
from piecework.sampling import SamplingParams

_GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
_NEAR_TIE = 2e-3
MODES = ("eager", "piecewise", "full")


def check_numbers(model: str, device: str) -> list[dict[str, Any]]:
    """Return a row per mode: tokens compared, near ties that flipped, tokens that are wrong, and graphs."""
    rng = random.Random(0)
    prompts = [[rng.randrange(320) for _ in range(n)] for n in (1, 2, 7, 16, 17, 40, 3, 90, 33)]
    expected, _ = _run(model, "cpu", "eager", prompts)
    rows = []
    for mode in MODES:
        found, counters = _run(model, device, mode, prompts)
        row = {"model": model.rsplit("/", 1)[-1], "mode": mode, **_compare(expected, found), **counters}
        row["ok"] = row["wrong"] == 0 and (row["replays"] > 0) == (mode != "eager")
        rows.append(row)
    return rows


def _run(
    model: str, device: str, mode: str, prompts: list[list[int]]
) -> tuple[list[list[tuple[int, float]]], dict[str, int]]:
    """Return for each prompt (token, lead over the second best) and the graph counters."""
    prefill = "eager" if mode == "eager" else "piecewise"
    settings: dict[str, Any] = {
        "model": model,
        "device": device,
        "dtype": "float32",
        "load_format": "dummy",
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "kv_cache_memory": 2**24,
        "workers": "inline",  # the counters are read from the runner
    }
    if device != "cpu":
        settings["compilation_config"] = {
            "decode_graph": mode,
            "prefill_graph": prefill,
            "decode_capture_sizes": [1, 2, 4],
            "prefill_capture_sizes": [4, 16, 64],
            "strict": False,
        }
    service = Service(EngineConfig.from_flat(settings))
    try:
        outputs: list[list[tuple[int, float]]] = [[] for _ in prompts]
        for number, delta in run_requests(service, prompts, _GREEDY):
            if delta.finish_reason == "error":
                raise RuntimeError(f"{model} on {device}, {mode}: {delta.error}")
            for entry in delta.logprobs or ():
                (_, best), (_, second) = entry.top[:2]
                outputs[number].append((entry.token_id, best - second))
        counters = service.runner.programs.counters
        return outputs, {"captures": counters.captures, "replays": counters.replays}
    finally:
        service.close()


def _compare(expected: list[list[tuple[int, float]]], found: list[list[tuple[int, float]]]) -> dict[str, int]:
    """Compare token by token; a sequence's comparison ends at its first difference."""
    compared = flips = wrong = 0
    for wanted, got in zip(expected, found, strict=True):
        for (token, lead), (other, _) in zip(wanted, got, strict=True):
            if token != other:
                flips += lead < _NEAR_TIE
                wrong += lead >= _NEAR_TIE
                break
            compared += 1
    return {"compared": compared, "flips": flips, "wrong": wrong}
