"""`bench latency`: how long one batch of a fixed shape takes, beside what the machine's memory allows."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from piecework.bench.cost import model_cost
from piecework.bench.floor import ReadFloor
from piecework.bench.offline import Job, check_fits, compare, random_job, run_alone, run_together, what_ran
from piecework.bench.options import LatencyOptions
from piecework.bench.stats import describe_ms, percentile
from piecework.engine.result import Result
from piecework.engine.service import Service

RUN_COUNTERS = ("replays", "eager_runs", "chained_runs", "padded_tokens", "recompiles")


@dataclass(frozen=True)
class Iteration:
    """Seconds of one batch: all of it, its prefill (until every prompt has its first token), and one decode
    step on average; and of a read of the weights just before it. `step` is None for one output token.
    """

    latency: float
    prefill: float
    step: float | None
    floor: float


def run_latency(
    service: Service,
    options: LatencyOptions,
    seed: int,
    on_done: Callable[[], None] = lambda: None,
    other: Service | None = None,
) -> dict[str, Any]:
    """Check that the batch gives the tokens of each prompt alone, then time it; return the figures.

    Each run has new prompts, so that no cached prefix helps. `on_done` is called after every run. `other`
    is another engine to compare with: it runs each batch too, before or after by turns.
    """
    services = [service] if other is None else [service, other]
    for one in services:
        check_fits(one, options.input_len, options.output_len)
    rng = random.Random(seed)

    def batch() -> list[Job]:
        vocabulary = service.model_config.vocab_size
        shape = (options.input_len, options.output_len, vocabulary, rng)
        return [random_job(*shape) for _ in range(options.batch_size)]

    checked = batch()
    alone = [result.token_ids for result in run_alone(service, checked)]
    check = compare(alone, [result.token_ids for result in run_together(service, checked)])
    for _ in range(options.num_iters_warmup):
        jobs = batch()
        for one in services:
            run_together(one, jobs)
        on_done()
    cost = model_cost(service.model_config, service.weight_bytes)
    floor = ReadFloor(cost.step_bytes(options.batch_size))
    service.profile.reset()
    before = service.graph_counters()
    rounds: dict[Service, list[Iteration]] = {one: [] for one in services}
    for number in range(options.num_iters):
        jobs = batch()
        for one in services if number % 2 == 0 else services[::-1]:
            seconds = floor.read()
            rounds[one].append(measure(run_together(one, jobs), options.output_len, seconds))
        on_done()
    iterations = rounds[service]
    report = {
        **_setting(service, options),
        "check": str(check),
        "outputs_equal": check.equal,
        "outputs_compared": check.compared,
        **figures(iterations, options, cost.step_bytes(options.batch_size)),
    }
    if other is not None:
        found = [result.token_ids for result in run_together(other, checked)]
        report["against"] = {
            **what_ran(other),
            "check": str(compare(alone, found)),
            **ratios(iterations, rounds[other]),
        }
    prefill = median(i.prefill for i in iterations)
    rows = options.batch_size
    flops = rows * (options.input_len * cost.token_flops(head=False) + 2.0 * cost.head)
    report["prefill_gflop_s"] = flops / prefill / 1e9
    if report["step_ms"] is not None:
        report["decode_gflop_s"] = rows * cost.token_flops(head=True) / report["step_ms"] / 1e6
    if service.profile.enabled:
        snapshot = service.profile.snapshot()
        snapshot["counters"].update(graph_counts(before, service.graph_counters()))
        report["profile"] = snapshot
    return report


def ratios(ours: Sequence[Iteration], others: Sequence[Iteration]) -> dict[str, Any]:
    """Return the other engine's times and the median of its times over ours, pair by pair: above 1, ours is
    faster. `step` is None for one output token.
    """
    pairs = list(zip(ours, others, strict=True))
    steps = [other.step / one.step for one, other in pairs if one.step and other.step]
    return {
        "latencies": [other.latency for _, other in pairs],
        "latency_ratio": median(other.latency / one.latency for one, other in pairs),
        "prefill_ratio": median(other.prefill / one.prefill for one, other in pairs),
        "step_ratio": median(steps) if steps else None,
    }


def graph_counts(
    before: Mapping[str, Mapping[str, int]], after: Mapping[str, Mapping[str, int]]
) -> dict[str, int]:
    """Return the counters of all programs as `body.replays`: what happened between two readings.

    What programs are made of, and how, happened before; so that is told as it stands.
    """
    return {
        f"{program}.{name}": count - before[program].get(name, 0) if name in RUN_COUNTERS else count
        for program, counts in after.items()
        for name, count in counts.items()
    }


def measure(results: Sequence[Result], output_len: int, floor: float) -> Iteration:
    """Return the times of one batch; its requests arrived together."""
    latency = max(result.timing.e2e for result in results)
    prefill = max(result.timing.ttft for result in results)
    step = (latency - prefill) / (output_len - 1) if output_len > 1 else None
    return Iteration(latency, prefill, step, floor)


def figures(iterations: Sequence[Iteration], options: LatencyOptions, step_bytes: float) -> dict[str, Any]:
    """Return the figures of all iterations; rates are of the median iteration."""
    latencies = [i.latency for i in iterations]
    steps = [i.step for i in iterations if i.step is not None]
    prefill = median(i.prefill for i in iterations)
    floor = median(i.floor for i in iterations)
    step = median(steps) if steps else None
    return {
        "avg_latency": fmean(latencies),
        "latencies": latencies,
        "percentiles": {str(p): percentile(latencies, p) for p in (10, 25, 50, 75, 90, 99)},
        **describe_ms("ttft", [i.prefill for i in iterations]),
        **describe_ms("tpot", steps),
        "prefill_tok_s": options.batch_size * options.input_len / prefill,
        "step_ms": None if step is None else step * 1e3,
        "decode_tok_s": None if step is None else options.batch_size / step,
        "step_bytes": step_bytes,
        "weight_gb_s": None if step is None else step_bytes / step / 1e9,
        "floor_ms": floor * 1e3,
        "floor_gb_s": step_bytes / floor / 1e9,
        "step_over_floor": None if step is None else step / floor,
    }


def _setting(service: Service, options: LatencyOptions) -> dict[str, Any]:
    return {
        **what_ran(service),
        "input_len": options.input_len,
        "output_len": options.output_len,
        "batch_size": options.batch_size,
        "num_iters": options.num_iters,
    }
