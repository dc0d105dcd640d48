"""The scheduler on its own: any load ends, within the budget, with each page owned once."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from piecework.config import SchedulerConfig
from piecework.engine.request import Request
from piecework.engine.scheduler import Scheduler
from piecework.kvcache import PagePool, pages_for
from piecework.sampling import SamplingParams

PAGE = 4


def make_request(number: int, prompt: int, output: int) -> Request:
    return Request(
        request_id=str(number),
        index=0,
        prompt_ids=tuple(range(prompt)),
        params=SamplingParams(),
        seed=0,
        max_tokens=output,
        stop_ids=frozenset(),
        listener=lambda delta: None,
        detokenizer=None,
        arrival=float(number),
    )


@dataclass
class Load:
    requests: list[tuple[int, int, int]]  # (step of arrival, prompt tokens, output tokens)
    pages: int
    chunk: int
    seqs: int
    budget: int


@st.composite
def loads(draw: st.DrawFn) -> Load:
    request = st.tuples(st.integers(0, 30), st.integers(1, 40), st.integers(1, 12))
    requests = sorted(draw(st.lists(request, min_size=1, max_size=12)))
    largest = max(pages_for(p + o, PAGE) for _, p, o in requests)
    seqs = draw(st.integers(1, 8))
    return Load(
        requests,
        draw(st.integers(largest + 1, largest + 30)),
        draw(st.sampled_from([1, 7, 64])),
        seqs,
        draw(st.integers(seqs, seqs + 40)),
    )


def run(load: Load) -> Scheduler:
    """Drive the scheduler until the load is done; every rule is checked at every step."""
    pool = PagePool(load.pages)
    config = SchedulerConfig(
        max_num_seqs=load.seqs, max_num_batched_tokens=load.budget, chunk_size=load.chunk
    )
    scheduler = Scheduler(config, pool, PAGE)
    requests = [make_request(i, p, o) for i, (_, p, o) in enumerate(load.requests)]
    coming = list(zip(load.requests, requests, strict=True))
    started: list[Request] = []
    for now in range(5000):
        while coming and coming[0][0][0] <= now:
            scheduler.add(coming.pop(0)[1])
        if not scheduler.has_work and not coming:
            assert all(r.finished for r in requests) and pool.used == 0
            return scheduler
        step = scheduler.schedule()
        assert step or not scheduler.has_work, "work waits but nothing runs"
        assert sum(s.span.length for s in step) <= load.budget
        assert len(scheduler.running) <= load.seqs
        assert len({s.request.request_id for s in step}) == len(step)
        owned = [page for r in requests for page in r.pages]
        assert len(set(owned)) == len(owned) == pool.used
        for s in step:
            assert s.request in scheduler.running and s.span.start == s.request.computed
            assert 0 < s.span.length <= max(1, load.chunk)
            assert s.span.stop <= len(s.request.pages) * PAGE
            if s.request not in started:
                started.append(s.request)
        for s in step:
            s.request.computed = s.span.stop
            if s.span.stop == s.request.num_tokens:
                s.request.accept(1, None)
                if s.request.finished:
                    scheduler.remove(s.request)
        assert started == sorted(started, key=lambda r: r.arrival), "an older request was overtaken"
    raise AssertionError("the load did not end")


@settings(max_examples=150, deadline=None)
@given(loads())
def test_any_load_ends_within_the_rules(load):
    run(load)


def test_a_small_pool_preempts_the_youngest_and_all_still_end():
    load = Load([(0, 8, 12)] * 4, pages=12, chunk=64, seqs=4, budget=64)
    scheduler = run(load)
    assert scheduler.preemptions > 0


def test_decoding_goes_on_while_a_long_prompt_is_read():
    pool = PagePool(100)
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, chunk_size=8), pool, PAGE
    )
    short, long = make_request(0, 3, 50), make_request(1, 100, 5)
    scheduler.add(short)
    steps = []
    for now in range(16):
        if now == 2:
            scheduler.add(long)
        step = scheduler.schedule()
        steps.append({s.request.request_id: s.span.length for s in step})
        for s in step:
            s.request.computed = s.span.stop
            if s.span.stop == s.request.num_tokens:
                s.request.accept(1, None)
    assert steps[0] == {"0": 3} and steps[1] == {"0": 1}
    assert steps[2:14] == [{"0": 1, "1": 8}] * 12
    assert steps[14] == {"0": 1, "1": 4} and steps[15] == {"0": 1, "1": 1}


def test_removing_a_waiting_or_running_request_frees_its_pages():
    pool = PagePool(10)
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=1), pool, PAGE)
    first, second = make_request(0, 10, 5), make_request(1, 10, 5)
    scheduler.add(first)
    scheduler.add(second)
    scheduler.schedule()
    assert pool.used == 3
    scheduler.remove(second)
    scheduler.remove(first)
    assert pool.used == 0 and not scheduler.has_work
