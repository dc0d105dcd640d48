"""What a step costs in operations of Python, not in time: nothing grows with the queue."""

from __future__ import annotations

import gc
import json
import resource
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from test_scheduler import PAGE, make_request

from piecework.bench.startup import TINY
from piecework.config import EngineConfig, SchedulerConfig
from piecework.engine.engine import Engine
from piecework.engine.request import Request
from piecework.engine.scheduler import Scheduler
from piecework.engine.service import Service
from piecework.kvcache import PagePool
from piecework.native import library


class Counted(Request):
    """A request of which each comparison counts, so that searches in lists do too."""

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = Request.__hash__


def operations(action: Callable[[], Any]) -> int:
    """How many instructions of Python run. The first run of an action may set something up, the collector may
    run somebody's finalizers in any: neither belongs to it.
    """
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        count += 1
        frame.f_trace_opcodes = True
        return trace

    before = sys.gettrace()
    gc.collect()
    gc.disable()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


def counted(number: int, prompt: int = 6) -> Request:
    request = make_request(number, prompt, 100)
    request.__class__ = Counted
    return request


def running(count: int, waiting: int) -> tuple[Scheduler, list[Request]]:
    """A scheduler of which so many requests decode, and the others that wait."""
    config = SchedulerConfig(max_num_seqs=count, max_num_batched_tokens=8 * count)
    scheduler = Scheduler(config, PagePool(8 * count), PAGE)
    requests = [counted(number) for number in range(count + waiting)]
    for request in requests:
        scheduler.add(request)
    advance(scheduler)
    return scheduler, requests[count:]


def advance(scheduler: Scheduler) -> None:
    for scheduled in scheduler.schedule():
        scheduled.request.computed = scheduled.span.stop
        scheduled.request.accept(1, None)


def costs(count: int, waiting: int) -> dict[str, int]:
    scheduler, queue = running(count, waiting)
    runs = list(scheduler.running)
    return {
        "schedule": operations(lambda: [scheduled.item() for scheduled in scheduler.schedule()]),
        "add": operations(lambda: scheduler.add(counted(-1))) - operations(lambda: counted(-1)),
        "remove waiting": operations(lambda: scheduler.remove(queue[waiting // 2])),
        "remove running": operations(lambda: scheduler.remove(runs[count // 2])),
    }


@pytest.mark.slow
def test_nothing_costs_more_with_a_long_queue() -> None:
    costs(16, 10)
    assert costs(16, 10) == costs(16, 3000)


@pytest.mark.slow
def test_a_step_costs_as_much_for_each_of_many_requests_as_of_few() -> None:
    few, many = costs(8, 4), costs(64, 4)
    assert many["schedule"] <= 8 * few["schedule"]
    assert many["remove running"] == few["remove running"]


@pytest.fixture
def engine(make_service: Callable[..., Service]) -> Engine:
    service = make_service(max_num_seqs=32)
    return Engine(service.runner, service.config)


def test_an_abort_costs_as_much_in_a_long_queue(engine: Engine) -> None:
    found = []
    engine.add(counted(0))
    engine.abort("0")  # the first of a kind begins its count
    for waiting in (8, 400):
        for number in range(waiting):
            engine.add(counted(number))
        found.append(operations(lambda: engine.abort("5")))
        found.append(operations(lambda: engine.is_open("7")))
        engine.end_all("abort")
    assert found[:2] == found[2:]


def test_decoding_keeps_no_memory_but_for_its_tokens(engine: Engine) -> None:
    steps, rows = 24, 32
    for number in range(rows):
        engine.add(make_request(number, 6, 200))
    for _ in range(16):  # lists and the pool's books have their size
        engine.step()
    tracemalloc.start()
    try:
        engine.step()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(steps):
            engine.step()
        kept = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    engine.end_all("abort")
    # Of each token: its id, when it came, and the places of both in lists that grow ahead.
    assert kept <= 160 * steps * rows, f"{kept / steps / rows:.0f} bytes for each token"


@pytest.mark.skipif(not hasattr(resource, "RUSAGE_THREAD"), reason="Linux counts page faults by thread")
def test_decoding_takes_no_new_memory_from_the_system(tmp_path: Path) -> None:
    if library() is None:
        pytest.skip("there is no C++ compiler")
    shape = {**TINY, "num_hidden_layers": 2, "vocab_size": 32768}  # logits of 4 MiB for 32 rows
    (tmp_path / "config.json").write_text(json.dumps(shape))
    settings = {"model": str(tmp_path), "load_format": "dummy", "dtype": "float32", "threads": 1}
    service = Service(EngineConfig.from_flat(settings))
    try:
        own = Engine(service.runner, service.config)
        for number in range(32):
            own.add(make_request(number, 6, 200))
        for _ in range(8):
            own.step()
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        for _ in range(20):
            own.step()
        faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    finally:
        service.close()
    assert faults < 20 * 100, f"{faults / 20:.0f} pages a step; the logits have 1024"
