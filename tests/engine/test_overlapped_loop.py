"""The overlapped loop gives what the plain one gives, whatever runs together, and was really on."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piecework.config import EngineConfig
from piecework.engine.flights import Flights
from piecework.engine.request import Request
from piecework.engine.scheduler import Scheduled
from piecework.engine.service import Service
from piecework.errors import RequestError
from piecework.profile import Profile, now
from piecework.runner.batch import Span
from piecework.sampling import SamplingParams
from piecework.workers.serving.process import ProcessRunner

CROWDED = {
    "page_size": 4,
    "num_pages": 17,
    "max_model_len": 64,
    "chunk_size": 8,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 6,
    "compilation_config": {"enable_debug_mode": True},  # which counts pages after each step
}
LIMIT = 120  # seconds, on a machine that has other things to do
BEGINNING = [7 + 3 * i for i in range(16)]
NOTHING = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=10)


@dataclass
class Asked:
    """A request, and after how many of its tokens it is given up."""

    prompt: list[int]
    params: SamplingParams
    give_up_after: int | None = None


@dataclass
class Got:
    """What the samples of a request gained, by index."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    scored: dict[int, list[float]] = field(default_factory=dict)
    ends: dict[int, tuple] = field(default_factory=dict)


def ask(service, asked, *, giving_up):
    """Submit all at once, and return what each got; every sample must end exactly once."""
    got = [Got() for _ in asked]
    open_samples = threading.Semaphore(0)

    def listener(number):
        one, mine = asked[number], got[number]

        def listen(delta):
            assert delta.index not in mine.ends, "it has ended"
            tokens = mine.tokens.setdefault(delta.index, [])
            tokens += delta.token_ids
            mine.texts[delta.index] = mine.texts.get(delta.index, "") + delta.text
            scores = [round(entry.logprob, 3) for entry in delta.logprobs or ()]
            mine.logprobs.setdefault(delta.index, []).extend(scores)
            if delta.prompt_logprobs:
                mine.scored[delta.index] = [round(e.logprob, 3) for e in delta.prompt_logprobs[1:]]
            if delta.finish_reason is not None:
                mine.ends[delta.index] = (delta.finish_reason, delta.stop_reason, delta.error)
                open_samples.release()
            elif giving_up and one.give_up_after is not None and len(tokens) >= one.give_up_after:
                service.abort(f"request {number}")

        return listen

    for number, one in enumerate(asked):
        service.submit(one.prompt, one.params, request_id=f"request {number}", listener=listener(number))
    for _ in range(sum(one.params.n for one in asked)):
        assert open_samples.acquire(timeout=LIMIT)
    return got


def idle(service):
    """Wait until no step is in flight; pages in use then."""
    service.kv_size()  # an order, done by a thread that has told of all ends
    return service.stats().kv_pages_used


prompts = st.one_of(
    st.lists(st.integers(3, 319), min_size=1, max_size=12),
    st.builds(
        lambda length, rest: BEGINNING[:length] + rest,
        st.integers(4, 16),
        st.lists(st.integers(3, 319), min_size=1, max_size=8),
    ),
)
params = st.builds(
    NOTHING.with_changes,
    temperature=st.sampled_from([0.0, 0.0, 0.9]),
    top_p=st.sampled_from([1.0, 0.9]),
    seed=st.integers(0, 9),
    n=st.sampled_from([1, 1, 1, 2]),
    max_tokens=st.integers(1, 40),
    ignore_eos=st.booleans(),
    min_tokens=st.sampled_from([0, 0, 1]),
    stop=st.sampled_from([(), (), ("e",), ("st", "a")]),
    stop_token_ids=st.sampled_from([(), (), tuple(range(0, 320, 5))]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    logprobs=st.sampled_from([None, 1]),
    prompt_logprobs=st.sampled_from([None, None, None, 0]),
)
requests = st.builds(Asked, prompts, params, st.sampled_from([None, None, None, 1, 3]))


@pytest.fixture(scope="module")
def plain(folder):
    yield from opened(folder)


@pytest.fixture(scope="module")
def overlapped(folder):
    yield from opened(folder, async_scheduling=True)


@pytest.fixture(scope="module")
def child(folder):
    yield from opened(folder, async_scheduling=True, workers="process")


def opened(folder, **changes):
    values = {"model": str(folder), "dtype": "float32", "threads": 1, **CROWDED, **changes}
    service = Service(EngineConfig.from_flat(values))
    yield service
    service.close()
    assert service.stats().kv_pages_used == 0 and not service._engine.has_work


def compare(plain, overlapped, asked):
    """Run a mix on both; a request that was given up has the beginning of what it would have had."""
    expected, found = ask(plain, asked, giving_up=False), ask(overlapped, asked, giving_up=True)
    for one, want, have in zip(asked, expected, found, strict=True):
        if all(end[0] != "abort" for end in have.ends.values()):
            assert have == want, one
            continue
        assert one.give_up_after is not None
        for index, tokens in have.tokens.items():
            assert tokens == want.tokens[index][: len(tokens)], one
    assert (idle(plain), idle(overlapped)) == (0, 0)


def test_any_mix_gives_the_tokens_of_the_plain_loop(plain, overlapped):
    @settings(max_examples=60, deadline=None)
    @given(st.lists(requests, min_size=1, max_size=7))
    def check(asked):
        compare(plain, overlapped, asked)

    check()
    stats, alone = overlapped.stats(), plain.stats()
    assert alone.overlapped_steps_total == 0 < stats.overlapped_steps_total > 0.5 * stats.steps_total
    assert min(stats.preemptions_total, stats.prefix_hits_total, stats.prefix_evictions_total) > 0
    assert {"stop", "length", "abort"} <= stats.finished.keys() and "error" not in stats.finished


def a_mix(seed, count):
    rng = random.Random(seed)
    mix = []
    for _ in range(count):
        own = NOTHING.with_changes(
            temperature=rng.choice([0.0, 0.8]),
            seed=rng.randrange(9),
            max_tokens=rng.randint(1, 30),
            repetition_penalty=rng.choice([1.0, 1.3]),
            presence_penalty=rng.choice([0.0, 0.4]),
            stop_token_ids=rng.choice([(), tuple(range(0, 320, 7))]),
            logprobs=rng.choice([None, 1]),
        )
        prompt = BEGINNING[: rng.choice([0, 8, 16])] + [rng.randrange(3, 320) for _ in range(9)]
        mix.append(Asked(prompt, own, rng.choice([None, None, 2])))
    return mix


def test_a_worker_process_has_two_steps_and_fills_in_the_tokens(plain, child):
    for seed in range(4):
        compare(plain, child, a_mix(seed, 8))
    stats = child.stats()
    assert child.workers()[0].kind == "process"
    assert stats.overlapped_steps_total > 0.5 * stats.steps_total and stats.preemptions_total > 0


def test_nothing_is_computed_behind_the_last_token_by_length(make_service):
    """Its place is known before: a step more would be there only where an end comes out unexpectedly."""
    service = make_service(async_scheduling=True)
    (got,) = ask(service, [Asked([5, 6, 7], NOTHING)], giving_up=False)
    assert idle(service) == 0 and len(got.tokens[0]) == 10
    assert (service.stats().steps_total, service.stats().overlapped_steps_total) == (10, 9)
    stop = NOTHING.with_changes(stop_token_ids=(got.tokens[0][3],), max_tokens=50)
    (stopped,) = ask(service, [Asked([5, 6, 7], stop)], giving_up=False)
    assert stopped.ends[0][0] == "stop" and idle(service) == 0
    assert service.stats().steps_total == 10 + len(stopped.tokens[0]) + 1


def test_a_step_runs_while_listeners_are_told(make_service):
    """A listener waits for the begin of the step behind the one it is told of, or never ends."""
    service = make_service(async_scheduling=True)
    execute, begun = service.runner.execute, [threading.Event() for _ in range(5)]
    steps, told, done = iter(begun), [], threading.Event()

    def counted(items):
        next(steps).set()
        return execute(items)

    def listen(delta):
        told.append(delta.finish_reason or begun[len(told) + 1].wait(LIMIT))
        if delta.finish_reason:
            done.set()

    service.runner.execute = counted
    service.submit([5, 6, 7], NOTHING.with_changes(max_tokens=5), listener=listen)
    assert done.wait(LIMIT) and told == [True] * 4 + ["length"]


def test_what_a_step_reads_stays_while_the_next_one_is_scheduled(make_service):
    """Page tables grow meanwhile."""
    service = make_service(page_size=4, async_scheduling=True)
    flights, sent, changed = service._engine._flights, [], []
    execute, send = service.runner.execute, flights.send

    def noted(step, items):
        send(step, items)
        sent.append(items)

    def watched(items):
        before = [(list(item.token_ids), list(item.pages)) for item in items]
        until = now() + 0.2  # the last step has none behind it
        while len(sent) < len(changed) + 2 and now() < until:
            time.sleep(0.0005)
        changed.append(before != [(list(item.token_ids), list(item.pages)) for item in items])
        return execute(items)

    service.runner.execute, flights.send = watched, noted
    (got,) = ask(service, [Asked([5, 6, 7], NOTHING)], giving_up=False)
    assert len(got.tokens[0]) == 10 and changed == [False] * 10


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_resizes_under_load_wait_for_what_is_in_flight(make_service, plain, device):
    changes = {"compilation_config": {"enable_debug_mode": True}} if device == "sim" else {}
    service = make_service(**{**CROWDED, **changes}, device=device, max_num_pages=60, async_scheduling=True)
    asked = [Asked(one.prompt, one.params) for one in a_mix(7, 24)]
    want = ask(plain, asked, giving_up=False)
    found = []
    thread = threading.Thread(target=lambda: found.extend(ask(service, asked, giving_up=False)))
    thread.start()
    sizes = [60, 18, 40, 17, 25, 60, 17]
    for pages in sizes:
        assert service.resize_kv(pages).pages == pages
    thread.join(LIMIT)
    assert found == want and idle(service) == 0
    assert service.stats().overlapped_steps_total > 0
    with pytest.raises(RequestError, match="pages"):
        service.resize_kv(3)


def test_static_slots_keep_what_a_session_has(make_service, plain):
    static = {
        "device": "sim",
        "kv_strategy": "static",
        "kv_capacities": "16,32,64",
        "kv_slots": 2,
        "chunk_size": 8,
        "async_scheduling": True,
    }
    service = make_service(**static)
    first = [Asked([5, 6, 7, 8], NOTHING), Asked(BEGINNING, NOTHING)]
    got = ask(service, first, giving_up=False)
    again = [Asked([*one.prompt, *have.tokens[0], 9], NOTHING) for one, have in zip(first, got, strict=True)]
    assert got == ask(plain, first, giving_up=False)
    assert ask(service, again, giving_up=False) == ask(plain, again, giving_up=False)
    stats = service.stats()
    assert stats.overlapped_steps_total > 0 and stats.prefix_hits_total == 2


def test_where_steps_are_audited_the_loop_is_plain(make_service, caplog):
    service = make_service(device="sim", audit_device="cpu", audit_every=2, async_scheduling=True)
    (got,) = ask(service, [Asked([5, 6, 7], NOTHING)], giving_up=False)
    assert len(got.tokens[0]) == 10 and service.audit().good > 1
    assert service.stats().overlapped_steps_total == 0
    assert "async_scheduling has no effect on sim: steps are audited" in caplog.text


def test_where_ranks_share_each_step_the_loop_is_plain(caplog):
    """Only the first rank has the tokens; nothing is started for this."""
    for size, ahead in ((1, True), (2, False)):
        config = EngineConfig.from_flat({"model": "none", "tensor_parallel_size": size})
        runner = ProcessRunner(config, Profile(), "cpu")
        flights = Flights(runner, lambda items: None, overlap=True)
        flights.send([], [])  # to nobody: what it fails with comes with the results
        assert flights.full and flights.failed() == []
        assert (runner.runs_ahead, "several ranks share each step" in caplog.text) == (ahead, not ahead)


def test_a_part_from_before_a_preemption_is_not_awaited_though_the_new_one_is_its_like():
    request = Request("a", 0, [5, 6, 7], NOTHING, 0, 1, frozenset(), lambda delta: None, None)
    old, new = (Scheduled(request, Span(0, 3), True) for _ in range(2))
    request.in_flight.append(old)
    assert old.awaited and (request.begun, request.coming, request.remaining) == (3, 1, 1)
    request.in_flight[:] = [new]
    assert new == old and new.awaited and not old.awaited
