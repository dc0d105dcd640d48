"""Failures with two steps in flight: both are void, no token is lost or doubled, and no page stays behind."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time

import pytest
from carried_rig import GREEDY, LONG, SMALL, collect, the_takeover

from piecework.engine.offline import run_requests
from piecework.errors import EngineDeadError, PieceworkError
from piecework.runner.batch import BatchItem, ItemResult, Span
from piecework.runner.sampler import SamplingState
from piecework.workers.serving.ahead import Chain

AHEAD = {**SMALL, "async_scheduling": True}
LIMIT = 120  # seconds, for a model to be loaded again on a machine that has other things to do


def ends(service, prompts, params=GREEDY):
    """Tokens of each request, or the error that it ended with."""
    found = {}
    for number, delta in run_requests(service, prompts, params):
        found.setdefault(number, []).extend(delta.token_ids)
        if delta.error is not None:
            found[number] = delta.error
    return [found[number] for number in range(len(prompts))]


def nothing_is_left(service):
    service.kv_size()
    stats = service.stats()
    assert (stats.kv_pages_used, stats.running, stats.waiting) == (0, 0, 0)
    assert stats.overlapped_steps_total > 0
    service.close()
    assert not service._engine.has_work
    assert "piecework-steps" not in {thread.name for thread in threading.enumerate()}


def test_a_step_that_fails_takes_the_one_behind_with_it_and_no_request_of_that_alone(make_service):
    """The long prompt comes while the others decode, in the step behind the one that fails."""
    service = make_service(**AHEAD)
    execute, calls, late = service.runner.execute, [], []
    done = threading.Event()

    def fails_once(items):
        calls.append(len(items))
        if len(calls) == 4:
            tokens = []

            def listen(delta):
                tokens.extend(delta.token_ids)
                if delta.finish_reason is not None:
                    late.append((tokens, delta.error))
                    done.set()

            service.submit(LONG, GREEDY, listener=listen)
            time.sleep(0.2)  # until it is in the step behind
            raise RuntimeError("this step is lost")
        return execute(items)

    service.runner.execute = fails_once
    found = ends(service, [[5, 6, 7], [8, 9]])
    assert found == ["the step failed: this step is lost"] * 2
    assert done.wait(LIMIT) and calls[3:5] == [2, 1]  # and not the step that both would be in
    assert ends(service, [LONG]) == [late[0][0]] and late[0][1] is None
    nothing_is_left(service)


@pytest.mark.parametrize("step", [1, 2, 5, 11])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_another_device_goes_on_with_what_was_committed(make_service, clean, executed, step, prefix_caching):
    fault = f"point=run,device=0,step={step}"
    settings = {**AHEAD, "prefix_caching": prefix_caching}
    service = make_service(device="sim,cpu", inject_fault=fault, **settings)
    assert collect(service) == clean
    carriage = the_takeover(service)
    assert carriage.copied_tokens > 0 and (carriage.computed_tokens, carriage.reason) == (0, None)
    assert sum(name == "sim" for name, _ in executed) == step + 1  # the one behind did not run
    assert service.device_name == "cpu" and service.stats().preemptions_total == 0
    nothing_is_left(service)


def test_an_operator_moves_there_and_back_while_steps_are_in_flight(make_service, clean, executed):
    service = make_service(device="sim,cpu", **AHEAD)
    # The second one comes when what was in flight at the first one has been told.
    moves = {7: lambda: service.move_to("cpu"), 24: lambda: service.move_to("sim")}
    assert collect(service, then=moves) == clean
    assert [c.computed_tokens for c in service.pauses().carriages] == [0, 0]
    assert [name for name, _ in executed if name == "cpu"]
    nothing_is_left(service)


def stop_then_kill(service, pid):
    """Stop the child, wait until it has two steps that it does not run, and kill it then."""
    os.kill(pid, signal.SIGSTOP)
    flights = service._engine._flights._flights

    def kill():
        until = time.monotonic() + LIMIT
        while len(flights) < 2 and time.monotonic() < until:
            time.sleep(0.001)
        seen.append(len(flights))
        os.kill(pid, signal.SIGKILL)

    seen = []
    thread = threading.Thread(target=kill)
    thread.start()
    return seen, thread


def test_a_worker_killed_with_two_steps_ends_what_ran_and_comes_back(make_service, clean):
    service = make_service(workers="process", async_scheduling=True, max_num_seqs=2)
    before, kills, last, tokens = service.workers()[0], [], {}, {}
    prompts = [[5 + number, 6, 7] for number in range(5)]  # 2 run, 3 wait
    for number, delta in run_requests(service, prompts, GREEDY):
        tokens.setdefault(number, []).extend(delta.token_ids)
        if len(tokens[number]) == 3 and not kills:
            kills.append(stop_then_kill(service, before.pid))
        if delta.finish_reason is not None:
            last[number] = delta
    ((seen, thread),) = kills
    thread.join(LIMIT)
    assert seen == [2] and service.workers()[0].generation == before.generation + 1
    errors = {number for number, delta in last.items() if delta.error is not None}
    assert len(errors) == 2 and all("SIGKILL" in last[number].error for number in errors)
    assert all(len(tokens[number]) == 10 for number in set(range(5)) - errors)
    assert collect(service)[0] == clean[0]
    nothing_is_left(service)


def test_a_worker_killed_with_two_steps_and_another_device_behind_it(make_service, clean):
    service = make_service(device="sim,cpu", isolate=True, **AHEAD)
    (worker,) = service.workers()
    assert worker.kind == "process"
    kills, submit, told = [], service.submit, itertools.count(1)

    def watched(*prompt, listener, **options):
        def listen(delta):
            listener(delta)
            if next(told) == 9:
                kills.append(stop_then_kill(service, worker.pid))

        return submit(*prompt, listener=listen, **options)

    service.submit = watched
    assert collect(service) == clean
    ((seen, thread),) = kills
    thread.join(LIMIT)
    assert seen == [2] and service.device_name == "cpu" and service.health()["status"] == "degraded"
    nothing_is_left(service)


def test_a_row_that_is_none_ends_its_request_and_the_others_go_on(make_service, executed):
    prompts = [[5, 6, 7], LONG, [8, 9]]
    service = make_service(**AHEAD)
    want = ends(service, prompts)
    execute, calls = service.runner.execute, []

    def spoils(items):
        results = execute(items)
        calls.append(items)
        if len(calls) == 5:
            place = next(i for i, item in enumerate(items) if len(item.pages) == 1)
            results[place] = ItemResult(error="the model's logits are not finite")
        return results

    service.runner.execute = spoils
    found = ends(service, prompts)
    bad = [number for number, one in enumerate(found) if isinstance(one, str)]
    assert len(bad) == 1 and [found[n] == want[n] for n in range(3)].count(True) == 2
    assert "not finite" in found[bad[0]] and ends(service, prompts) == want
    nothing_is_left(service)


def test_a_step_that_is_refused_leaves_the_one_before_it_alone(make_service):
    """A long prompt comes while another request decodes, and makes a step that is too large for its ring."""
    service = make_service(**AHEAD, ring_heap="4096", prefix_caching=False)
    (want,) = ends(service, [[5, 6, 7]])
    heard, tokens, ended = {}, [], threading.Semaphore(0)

    def listen(name, delta):
        tokens.extend(delta.token_ids)
        if name == "short" and len(tokens) == 3:
            service.submit(LONG, GREEDY, listener=lambda delta: listen("long", delta))
        if delta.finish_reason is not None:
            heard[name] = delta.error
            ended.release()

    service.submit([5, 6, 7], GREEDY, listener=lambda delta: listen("short", delta))
    assert ended.acquire(timeout=LIMIT) and ended.acquire(timeout=LIMIT)
    assert all("raise --ring-heap" in error for error in heard.values())
    assert 3 < len(tokens) < 10 and tokens == want[: len(tokens)]  # all that ran before, and nothing after
    assert ends(service, [[5, 6, 7]]) == [want]
    nothing_is_left(service)


@pytest.mark.parametrize("workers", ["inline", "process"])
def test_a_close_with_two_steps_in_flight_ends_everything(make_service, workers):
    service = make_service(**AHEAD, workers=workers)
    heard, closed = [], []
    params = GREEDY.with_changes(max_tokens=200)
    ended = threading.Semaphore(0)

    def listen(delta):
        heard.append(delta)
        if len(heard) == 6:
            closer = threading.Thread(target=service.close)
            closed.append(closer)
            closer.start()
        if delta.finish_reason is not None:
            ended.release()

    for prompt in ([5, 6], [7]):
        service.submit(prompt, params, listener=listen)
    assert ended.acquire(timeout=LIMIT) and ended.acquire(timeout=LIMIT)
    closed[0].join(LIMIT)
    assert [d.finish_reason for d in heard if d.finish_reason] == ["abort"] * 2
    with pytest.raises(EngineDeadError):
        service.submit([5], params, listener=listen)
    assert service.stats().kv_pages_used == 0 and not service._engine.has_work


def test_a_chain_fills_in_what_the_step_before_drew_and_refuses_after_a_failure():
    state = SamplingState(GREEDY.with_changes(presence_penalty=0.5), 1, 3, [4], [10, 11])
    item = BatchItem((0,), Span(3, 1), [1], state, follows=1)
    chain = Chain()
    with pytest.raises(PieceworkError, match="the step before"):
        chain.fill([item], ahead=True)
    other = item._replace(follows=None)
    assert chain.fill([other], ahead=False) == [other]
    chain.ran([ItemResult(7), ItemResult(12)])
    (filled,) = chain.fill([item], ahead=True)
    assert (filled.token_ids, filled.sampling.index) == ((12,), 3)
    assert filled.sampling.output_ids.tolist() == [10, 11, 12] and state.output_ids == [10, 11]
    with pytest.raises(PieceworkError, match="the step before"):
        chain.fill([item], ahead=True)
