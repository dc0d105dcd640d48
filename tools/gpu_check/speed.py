"""Step times on the device: eager, piecewise and full, with the share of the measured copy bandwidth."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch

from piecework.config import EngineConfig
from piecework.kvcache import pages_for
from piecework.profile import Profile, now
from piecework.runner.batch import BatchItem, Span
from piecework.runner.load import load
from piecework.runner.runner import Runner
from piecework.runner.sampler import SamplingState
from piecework.sampling import SamplingParams

MODES = ("eager", "piecewise", "full")
_GREEDY = SamplingParams(temperature=0.0)


def copy_bandwidth(device: torch.device, nbytes: int) -> float:
    """Measured GB/s of a device-to-device copy, bytes read plus bytes written."""
    source = torch.empty(nbytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return 2 * source.nbytes / _time(copy, 10) / 1e9


def time_modes(
    model: str,
    device: str,
    *,
    dtype: str,
    batches: tuple[int, ...],
    context: int,
    tokens: tuple[int, ...],
    repeats: int,
    quantization: str = "auto",
    modes: tuple[str, ...] = MODES,
) -> list[dict[str, Any]]:
    """Time decode steps at each batch size and prefill steps at each token count, mode by mode.

    The modes run in turns, so that a change of the clock hits all of them; `eager` must be among them.
    """
    settings = {"model": model, "device": device, "dtype": dtype, "quantization": quantization}
    runners = {mode: _runner(settings, mode, batches, context, tokens) for mode in modes}
    rows: list[dict[str, Any]] = []
    for batch in batches:
        times = _in_turns(runners, [_decode_item(i, context) for i in range(batch)], repeats)
        rows += [_row("decode", batch, mode, times, runners[mode], batch * context) for mode in times]
    prefill = {mode: runner for mode, runner in runners.items() if mode != "full"}
    for count in tokens:
        times = _in_turns(prefill, [_prefill_item(count)], repeats)
        rows += [_row("prefill", count, mode, times, prefill[mode], count) for mode in times]
    return rows


def _runner(
    settings: dict[str, Any],
    mode: str,
    batches: tuple[int, ...],
    context: int,
    tokens: tuple[int, ...],
) -> Runner:
    graphs = {
        "decode_graph": mode,
        "prefill_graph": "eager" if mode == "eager" else "piecewise",
        "decode_capture_sizes": list(batches),
        "prefill_capture_sizes": list(tokens),
    }
    settings = {
        **settings,
        "load_format": "dummy",
        "max_model_len": max(context, *tokens) + 16,
        "max_num_seqs": max(batches),
        "max_num_batched_tokens": max(*batches, *tokens),
        "num_pages": max(batches) * pages_for(context, 16) + pages_for(max(tokens), 16) + 2,
        "compilation_config": graphs,
    }
    return load(EngineConfig.from_flat(settings), Profile()).runner


def _decode_item(number: int, context: int) -> BatchItem:
    count = pages_for(context, 16)
    pages = range(1 + number * count, 1 + (number + 1) * count)
    return BatchItem([7], Span(context - 1, 1), list(pages), SamplingState(_GREEDY, 0, 0, (), ()))


def _prefill_item(count: int) -> BatchItem:
    pages = list(range(1, 1 + pages_for(count, 16)))
    ids = [i % 300 for i in range(count)]
    return BatchItem(ids, Span(0, count), pages, SamplingState(_GREEDY, 0, 0, (), ()))


def _in_turns(runners: dict[str, Runner], items: list[BatchItem], repeats: int) -> dict[str, float]:
    """Return the median seconds of a step for each runner."""
    for runner in runners.values():
        for _ in range(3):
            runner.execute(items)
    times: dict[str, list[float]] = {mode: [] for mode in runners}
    for _ in range(repeats):
        for mode, runner in runners.items():
            start = now()
            runner.execute(items)
            times[mode].append(now() - start)
    return {mode: median(values) for mode, values in times.items()}


def _row(
    phase: str, size: int, mode: str, times: dict[str, float], runner: Runner, context_tokens: int
) -> dict[str, Any]:
    model = runner.programs.model
    weights = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    kv = runner.cache.nbytes // (runner.cache.num_pages * runner.cache.page_size) * context_tokens
    seconds = times[mode]
    return {
        "weights": "int8" if any(p.dtype == torch.int8 for p in model.parameters()) else "float",
        "phase": phase,
        "size": size,
        "mode": mode,
        "ms": seconds * 1e3,
        "ratio_to_eager": times["eager"] / seconds,
        "tokens_per_s": size / seconds,
        "gb_per_s": (weights + kv) / seconds / 1e9,
        "replays": runner.programs.counters.replays,
    }


def _time(run: Any, repeats: int) -> float:
    run()
    found = []
    for _ in range(repeats):
        start = now()
        run()
        found.append(now() - start)
    return median(found)
