"""`bench growth`: how a decode step grows, part by part, with batch, context, layers and waiting requests."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from piecework.bench.growth_steps import PARTS, WARMUP, Steps
from piecework.bench.offline import Check, what_ran
from piecework.bench.options import GrowthOptions, StartupOptions
from piecework.bench.startup import models
from piecework.config import EngineConfig
from piecework.engine.request import Request
from piecework.engine.service import Service
from piecework.errors import ConfigError
from piecework.profile import now

Row = dict[str, Any]
Done = Callable[[], None]
_HOST = [f"{name}_ms" for name in PARTS if name != "model"] + ["rest_ms"]
_REPEATS = 32
"""Requests that are added, and then aborted, in a row of the table of queues."""


def run_growth(
    settings: Mapping[str, Any], options: GrowthOptions, on_done: Done = lambda: None
) -> dict[str, Any]:
    """Check each model's tokens, then measure the tables that are chosen.

    `settings` are the engine's that were given; `on_done` is called after every row. Raises ConfigError where
    a row does not fit the model or what was given.
    """
    report: dict[str, Any] = {"cases": {}}
    checks: list[Check] = []
    cases = options.chosen()
    if set(cases) - {"layers"}:
        with _steps({**_room(options), **settings}, options, checks) as (service, steps):
            report |= what_ran(service)
            measures = {"batch": _batch, "context": _context, "queue": _queue}
            for case in cases:
                if case in measures:
                    rows = measures[case](service, steps, options, on_done)
                    report["cases"][case] = with_growth(case, rows)
    if "layers" in cases:
        rows = _layers(settings, options, checks, report, on_done)
        report["cases"]["layers"] = with_growth("layers", rows)
    compared, equal = (sum(getattr(check, name) for check in checks) for name in ("compared", "equal"))
    differences = [c.first_difference for c in checks if c.first_difference is not None]
    total = Check(compared, equal, min(differences, default=None))
    report["cases"] = {case: report["cases"][case] for case in cases}
    return {**report, "check": str(total), "outputs_equal": equal, "outputs_compared": compared}


def count_rows(options: GrowthOptions) -> int:
    """How many rows the chosen tables have."""
    fields = {"batch": "batch_sizes", "context": "contexts", "layers": "layers", "queue": "queue"}
    counts = {case: len(options.sizes(field)) for case, field in fields.items()}
    counts["context"] *= len(options.sizes("context_batches"))
    return sum(counts[case] for case in options.chosen())


def with_growth(case: str, rows: Sequence[Row]) -> list[Row]:
    """Add to each row, as `growth`, by what each of its times is multiplied when `case` doubles.

    The factors are those from the row before it of the same batch; there is none for the first.
    """
    found = []
    for i, row in enumerate(rows):
        before = rows[i - 1] if i and rows[i - 1][case] < row[case] else None
        growth = None
        if before is not None:
            doublings = math.log2(row[case] / before[case])
            times = [name for name in row if name.endswith(("_ms", "_us")) and before[name] > 0 < row[name]]
            growth = {name: (row[name] / before[name]) ** (1 / doublings) for name in times}
        found.append({**row, "growth": growth})
    return found


@contextmanager
def _steps(
    settings: Mapping[str, Any], options: GrowthOptions, checks: list[Check]
) -> Iterator[tuple[Service, Steps]]:
    """Load a model and check its tokens; then its steps can be timed."""
    config = EngineConfig.from_flat({**settings, "profile": True, "workers": "inline"})  # it looks inside
    with closing(Service(config)) as service:
        steps = Steps(service, config.load.seed)
        checks.append(steps.check(options.verify, options.input_len))
        yield service, steps


def _room(options: GrowthOptions) -> dict[str, Any]:
    """Settings by which the largest row fits, with a page for each request to grow into."""
    cases, length = options.chosen(), options.input_len + WARMUP + options.steps
    rows = [(count, length) for count in options.sizes("batch_sizes")] if "batch" in cases else []
    if "context" in cases:
        rows += [(n, c) for n in options.sizes("context_batches") for c in options.sizes("contexts")]
    if "queue" in cases:
        rows.append((options.running, length))
    most = max([options.verify, *(count for count, _ in rows)])
    tokens = max(count * (tokens + 32) for count, tokens in rows)
    page = EngineConfig().cache.page_size
    return {
        "max_num_seqs": most,
        "max_num_batched_tokens": max(most, EngineConfig().scheduler.max_num_batched_tokens),
        "num_pages": tokens // page + 2 * most + 1,
    }


def _row(steps: Steps, rows: int, options: GrowthOptions) -> Row:
    """Time steps of what runs, and say what they come to."""
    times = steps.timed(rows, options.steps)
    return {
        **times,
        "tok_s": rows / times["step_ms"] * 1e3,
        "schedule_share": times["schedule_ms"] / times["step_ms"],
        "request_us": sum(times[name] for name in _HOST) / rows * 1e3,
    }


def _batch(service: Service, steps: Steps, options: GrowthOptions, on_done: Done) -> list[Row]:
    rows = []
    for count in options.sizes("batch_sizes"):
        steps.start(count, options.input_len)
        rows.append({"batch": count, **_row(steps, count, options)})
        on_done()
    return rows


def _context(service: Service, steps: Steps, options: GrowthOptions, on_done: Done) -> list[Row]:
    """Requests have as many tokens as the row says at the last step."""
    taken = WARMUP + options.steps
    rows = []
    for count in options.sizes("context_batches"):
        for context in options.sizes("contexts"):
            if not taken < context <= service.max_model_len:
                allowed = f"from {taken + 1} (steps) to {service.max_model_len} (max_model_len)"
                raise ConfigError("contexts", context, allowed)
            steps.start(count, context - taken)
            rows.append({"batch": count, "context": context, **_row(steps, count, options)})
            on_done()
    return rows


def _queue(service: Service, steps: Steps, options: GrowthOptions, on_done: Done) -> list[Row]:
    """Steps with many that wait, and µs to add a request, to abort one that waits and one that runs."""
    rows, engine = [], steps.engine
    prompt = steps.prompt(options.input_len)
    for count in options.sizes("queue"):
        running = steps.start(options.running, options.input_len)
        engine.step()  # all of these run before others wait
        waiting = [steps.request(prompt) for _ in range(count)]
        for request in waiting:
            engine.add(request)
        row: Row = {"queue": count, "running": options.running, **_row(steps, options.running, options)}
        added = [steps.request(prompt) for _ in range(_REPEATS)]
        row["add_us"] = _each(engine.add, added)
        middle = waiting[len(waiting) // 2 :][:_REPEATS]
        for name, some in (("abort_waiting_us", middle), ("abort_running_us", running[:_REPEATS])):
            row[name] = _each(lambda request: engine.abort(request.request_id), some)
        rows.append(row)
        on_done()
    engine.end_all("abort")
    return rows


def _each(action: Callable[[Request], None], requests: Sequence[Request]) -> float:
    """The median time of the action on a request, in µs."""
    taken = []
    for request in requests:
        begin = now()
        action(request)
        taken.append((now() - begin) * 1e6)
    return median(taken)


def _layers(
    settings: Mapping[str, Any],
    options: GrowthOptions,
    checks: list[Check],
    report: dict[str, Any],
    on_done: Done,
) -> list[Row]:
    """Steps of one request, of models that differ in their depth only."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="piecework-growth-") as folder:
        counts = ",".join(map(str, options.sizes("layers")))
        for model in models(settings, StartupOptions(layers=counts), Path(folder)):
            with _steps(model.settings, options, checks) as (service, steps):
                for name, value in what_ran(service).items():
                    report.setdefault(name, value)
                steps.start(1, options.input_len)
                layers = service.model_config.num_layers
                rows.append({"layers": layers, "model": model.name, **_row(steps, 1, options)})
            on_done()
    return rows
