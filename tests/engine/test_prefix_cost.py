"""What prefix reuse costs in operations of Python: as much with a large tree as with a small one."""

from __future__ import annotations

from array import array

import pytest
from test_scheduler import PAGE, make_request
from test_step_cost import operations

from piecework.config import SchedulerConfig
from piecework.engine.request import Request
from piecework.engine.scheduler import Scheduler
from piecework.kvcache import PagePool
from piecework.kvcache.prefix import Tokens


def page_of(number: int) -> Tokens:
    return lambda start, stop: [number, 9, 9, 9]


def scheduler_with(pages: int) -> Scheduler:
    """A scheduler whose pool is full of idle pages: prompts of five tokens, each with a page of its own."""
    scheduler = Scheduler(SchedulerConfig(), PagePool(pages + 1), PAGE, prefix_caching=True)
    tree = scheduler.tree
    for number in range(pages):
        own = array("i", tree.allocate(1) or ())
        tree.extend(tree.root, page_of(number), own, PAGE)
        tree.release(own)
    assert len(tree) == tree.idle == tree.available == pages
    return scheduler


def run_a_step(scheduler: Scheduler) -> None:
    for scheduled in scheduler.schedule():
        request = scheduled.request
        request.computed = scheduled.span.stop
        scheduler.keep(request)
        request.accept(1, None)


def request_of(first: int) -> Request:
    request = make_request(first, 5, 100)
    request.prompt_ids = (first, 9, 9, 9, 9)
    return request


def costs(pages: int) -> dict[str, int]:
    scheduler = scheduler_with(pages)
    known, unknown = request_of(pages - 1), request_of(-1)
    found = {}
    for name, request in (("a known beginning", known), ("an unknown one, with evictions", unknown)):
        scheduler.add(request)
        found[name] = operations(lambda: run_a_step(scheduler))
    assert known.cached_tokens == PAGE and unknown.cached_tokens == 0 and scheduler.tree.evictions == 3
    found["decoding"] = operations(lambda: [run_a_step(scheduler) for _ in range(2 * PAGE)])
    found["the end"] = operations(lambda: scheduler.remove(unknown))
    return found


@pytest.mark.slow
def test_nothing_costs_more_with_a_large_tree() -> None:
    costs(16)
    assert costs(16) == costs(4000)
