"""`bench failover`: the pause of a batch whose device fails, beside what computing it again must take."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from statistics import median
from typing import Any

from piecework.bench.offline import Job, check_fits, compare, random_job, run_together
from piecework.bench.options import FailoverOptions
from piecework.compilation import CompilationConfig
from piecework.config import EngineConfig
from piecework.engine.result import Result
from piecework.engine.service import Service
from piecework.errors import ConfigError, DeviceError
from piecework.tables import table

DEVICES = "sim,cpu"
_LOOK = 0.02  # seconds between looks at a standby that is made


def run_failover(
    settings: Mapping[str, Any], options: FailoverOptions, on_done: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Let the first device fail in the middle of each batch; `settings` are the engine's that were given.

    Raises ConfigError where a fault is planned already, or would end this process.
    """
    settings = {"device": DEVICES, **settings}
    config = EngineConfig.from_flat(settings)
    if config.device.inject_fault is not None:
        raise ConfigError("inject_fault", config.device.inject_fault, "nothing: the benchmark plans its own")
    if options.kind in ("abort", "hang") and not config.device.isolate and config.worker.workers != "process":
        allowed = "error or lost; others need --isolate, or they would be the end of this process"
        raise ConfigError("kind", options.kind, allowed)
    cases = []
    for batch in options.sizes():
        for standby in options.chosen():
            cases.append(_case(settings, config, options, standby, batch))
            gc.collect()  # a closed engine's weights are in cycles, and two of the next one's are to come
            on_done()
    return {
        "device": config.device.device,
        "input_len": options.input_len,
        "kind": options.kind,
        "cases": cases,
    }


def _case(
    settings: Mapping[str, Any], config: EngineConfig, options: FailoverOptions, standby: str, batch: int
) -> dict[str, Any]:
    """One batch that loses its device; times in ms. Beside it: clean runs on the device that took over."""
    step = _prefill_steps(config, options.input_len, batch) + options.fail_at
    fault = f"point=run,device=0,step={step},kind={options.kind}"
    changed = {**settings, "standby": standby, "inject_fault": fault}
    changed["compilation_config"] = _few_captures(config, batch)
    with closing(Service(EngineConfig.from_flat(changed))) as service:
        check_fits(service, options.input_len, options.output_len)
        _wait_for_standby(service)
        rng, vocabulary = random.Random(config.load.seed), service.model_config.vocab_size
        jobs = [random_job(options.input_len, options.output_len, vocabulary, rng) for _ in range(batch)]
        results = run_together(service, jobs)
        pauses, events = service.pauses(), service.failovers()
        if len(events) != 1 or len(pauses.last_gaps) != batch:
            raise DeviceError(config.device.first, "run", f"the fault did not meet all {batch} requests")
        again = [
            _interrupted(job, result, pauses.last_gaps) for job, result in zip(jobs, results, strict=True)
        ]
        clean = run_together(service, jobs)
        check = compare([one.token_ids for one in clean], [one.token_ids for one in results])
        prefills = [
            max(result.timing.ttft for result in run_together(service, again)) for _ in range(options.repeats)
        ]
        steps = [gap for result in clean for gap in result.timing.itl]
        return {
            "standby": standby,
            "batch": batch,
            "tokens": sum(len(job.prompt_ids) for job in again),
            "from": events[0].source,
            "to": events[0].target,
            "dtype": service.dtype,
            "copied_tokens": pauses.copied_tokens,
            "computed_tokens": pauses.computed_tokens,
            "gap_ms": max(pauses.last_gaps) * 1e3,
            "detection_ms": pauses.last_detection * 1e3,
            "copy_ms": sum(how.seconds for how in pauses.carriages) * 1e3,
            "ready_ms": events[0].seconds * 1e3,
            "prefill_ms": median(prefills) * 1e3,
            "step_ms": median(steps) * 1e3,
            "outputs_equal": check.equal,
            "outputs_compared": check.compared,
            "first_difference": check.first_difference,
        }


def _few_captures(config: EngineConfig, batch: int) -> CompilationConfig:
    """The settings with the captures that the batch needs, where `sim` is the first device.

    All of its default sizes take it minutes, and the device that fails is not the one that is timed.
    """
    settings = config.compilation_config
    asked = (
        settings.decode_capture_sizes,
        settings.prefill_capture_sizes,
        settings.max_decode_capture_size,
        settings.max_prefill_capture_size,
        settings.max_capture_size,
    )
    is_sim = config.device.first.partition(":")[0] == "sim"
    if not is_sim or settings.strict or any(sizes is not None for sizes in asked):
        return settings
    decode = min(batch, config.scheduler.max_num_seqs)
    return settings.with_changes(decode_capture_sizes=[decode], prefill_capture_sizes=[1])


def _prefill_steps(config: EngineConfig, input_len: int, batch: int) -> int:
    scheduler = config.scheduler
    chunks, budget = -(-input_len // scheduler.chunk_size), scheduler.max_num_batched_tokens
    return max(chunks, -(-batch * input_len // budget))


def _wait_for_standby(service: Service) -> None:
    """Return when it is warm, or where there is none; raises DeviceError where it can't be made."""
    while (found := service.standby()) is not None and found["status"] != "warm":
        if found["status"] == "failed":
            reasons = [event["reason"] for event in service.health()["events"]]
            raise DeviceError(found["device"], "standby", "; ".join(map(str, reasons)))
        time.sleep(_LOOK)


def _interrupted(job: Job, result: Result, gaps: Sequence[float]) -> Job:
    """The job as it was computed again: its prompt, and what it had generated when its device failed."""
    known = next(number for number, seconds in enumerate(result.timing.itl, 1) if seconds in gaps)
    return Job([*job.prompt_ids, *result.token_ids[:known]], 1)


def within_goal(case: Mapping[str, Any]) -> bool:
    """Whether a pause, without the time until the failure was known, is a prefill and two steps at most."""
    goal: float = case["prefill_ms"] + 2 * case["step_ms"]
    return bool(case["gap_ms"] - case["detection_ms"] <= goal)


def failover_table(report: Mapping[str, Any]) -> str:
    """The figures for a person."""
    rows = []
    for case in report["cases"]:
        goal = case["prefill_ms"] + 2 * case["step_ms"]
        rest = case["gap_ms"] - case["detection_ms"]
        rows.append(
            (
                case["standby"],
                case["batch"],
                case["tokens"],
                case["copied_tokens"],
                *(
                    f"{case[name]:.1f}"
                    for name in ("gap_ms", "detection_ms", "ready_ms", "copy_ms", "prefill_ms", "step_ms")
                ),
                f"{rest / goal:.2f}",
                f"{case['outputs_equal']} of {case['outputs_compared']}",
            )
        )
    head = [
        "standby",
        "batch",
        "tokens",
        "copied",
        "gap",
        "detected",
        "ready",
        "copy",
        "prefill",
        "step",
        "gap / goal",
        "equal",
    ]
    return (
        f"{report['device']}, {report['kind']} in the middle of a batch; times in ms\n"
        + table(head, rows)
        + "\ngoal: prefill of the same tokens, and two steps; the gap without the time until it was detected"
    )
