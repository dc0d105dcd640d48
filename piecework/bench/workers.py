"""`bench workers`: what it costs that a step runs in another process, and what processes cost that wait."""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from piecework.bench.options import WorkersOptions
from piecework.bench.stats import percentile
from piecework.profile import now, processor_time
from piecework.runner.batch import BatchItem, Span
from piecework.runner.sampler import SamplingState
from piecework.sampling import SamplingParams
from piecework.tables import table
from piecework.workers.process.messages import encode
from piecework.workers.process.process import ChildProcess, Plan
from piecework.workers.process.reap import close_all
from piecework.workers.serving.steps import StepWriter

_ECHO = Plan("echo", "piecework.workers.process.echo:Echo")
_CONTEXT, _PAGE = 1024, 16  # tokens of each request in a step, and of a page


def run_workers(options: WorkersOptions, on_done: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Start children that import no torch, send them steps, let them idle. Times in ms or us as named."""
    children: list[ChildProcess] = []
    starts = []
    try:
        for _ in range(options.children):
            begin = now()
            children.append(ChildProcess(_ECHO))
            children[-1].ready.result()
            starts.append((now() - begin) * 1e3)
        hops = []
        for size in options.sizes():
            hops.append(_hop(children[0], size, options.steps))
            on_done()
        idle = _idle(children, options.idle_seconds)
        on_done()
    finally:
        close_all(children, 5.0)
    return {"start_ms": median(starts), "children": options.children, "hops": hops, "idle": idle}


def _hop(child: ChildProcess, size: int, steps: int) -> dict[str, Any]:
    """Write a decode step of `size` requests, send it, and take the answer, again and again.

    `processor_us` is what both processes took of processors, whatever else the machine does.
    """
    params = SamplingParams(temperature=0.0)
    pages = array("i", range(_CONTEXT // _PAGE))
    states = [SamplingState(params, 0, 0, (), ()) for _ in range(size)]
    items = [BatchItem([1], Span(_CONTEXT - 1, 1), pages, state) for state in states]
    writer, times, sent = StepWriter(size), [], 0
    for number in range(steps + steps // 10):
        if number == steps // 10:
            spent = processor_time() + _spent(child.pid)
        begin = now()
        body = encode(writer.write(items, profiled=False))
        child.ask("step", body, timeout=60.0)
        if number >= steps // 10:  # those before are the warm-up
            times.append((now() - begin) * 1e6)
        sent = len(body)
    return {
        "requests": size,
        "bytes": sent,
        "median_us": median(times),
        "p95_us": percentile(times, 95),
        "processor_us": (processor_time() + _spent(child.pid) - spent) / steps * 1e6,
    }


def _idle(children: Sequence[ChildProcess], seconds: float) -> dict[str, float]:
    """Shares of a core that children, and this process with their threads, take while nothing happens."""
    before, own, begin = [_spent(child.pid) for child in children], processor_time(), now()
    time.sleep(seconds)
    passed = now() - begin
    spent = [_spent(child.pid) - old for child, old in zip(children, before, strict=True)]
    return {"seconds": passed, "child": max(spent) / passed, "parent": (processor_time() - own) / passed}


def _spent(pid: int | None) -> float:
    """Processor seconds of a process, see proc_pid_stat(5)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def workers_table(report: dict[str, Any]) -> str:
    """The figures for a person."""
    rows = [
        (
            hop["requests"],
            hop["bytes"],
            *(f"{hop[name]:.0f}" for name in ("median_us", "p95_us", "processor_us")),
        )
        for hop in report["hops"]
    ]
    idle = report["idle"]
    return "\n".join(
        [
            table(["requests", "bytes", "round trip, median us", "p95 us", "of processors, us"], rows),
            f"start of a child without torch: {report['start_ms']:.0f} ms",
            f"idle over {idle['seconds']:.0f} s, of a core: {idle['child']:.2%} the busiest of "
            f"{report['children']} children, {idle['parent']:.2%} this process",
        ]
    )
