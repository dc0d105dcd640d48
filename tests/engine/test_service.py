"""How requests begin and end: limits, stops, cancels, failures, shutdown."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time

import pytest
import torch

from piecework.engine.offline import run_requests
from piecework.errors import ConfigError, EngineDeadError, QueueFullError, RequestError
from piecework.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


def run(service, prompt, params):
    return [d for _, d in run_requests(service, [prompt], params)]


def tokens(deltas):
    return [t for d in deltas for t in d.token_ids]


def hold_steps(service, until, after):
    """After so many steps the next one ends when `until` holds, which whoever makes it so tells the lock."""
    examine, steps = service.runner.examine, itertools.count()

    def held(items):
        if next(steps) >= after:
            with service._intake._changed:
                assert service._intake._changed.wait_for(until, 60)
        return examine(items)

    service.runner.examine = held


def test_max_tokens_ends_with_length_and_usage(make_service):
    deltas = run(make_service(), [5, 6, 7], GREEDY.with_changes(max_tokens=6))
    assert [d.finish_reason for d in deltas] == [None] * 5 + ["length"]
    last = deltas[-1]
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.cached_tokens) == (3, 6, 0)
    assert 0 <= last.timing.queue <= last.timing.ttft <= last.timing.e2e and len(last.timing.itl) == 5


def test_without_max_tokens_the_context_is_the_limit(make_service):
    deltas = run(make_service(max_model_len=40), [5] * 30, GREEDY)
    assert deltas[-1].finish_reason == "length" and len(tokens(deltas)) == 10


def test_stop_tokens_end_the_request_but_not_before_min_tokens(make_service):
    service = make_service()
    plain = tokens(run(service, [5, 6, 7], GREEDY.with_changes(max_tokens=8)))
    first = plain.index(plain[3])
    stopped = run(service, [5, 6, 7], GREEDY.with_changes(max_tokens=8, stop_token_ids=(plain[3],)))
    assert tokens(stopped) == plain[: first + 1]
    assert (stopped[-1].finish_reason, stopped[-1].stop_reason) == ("stop", plain[3])
    later = run(
        service, [5, 6, 7], GREEDY.with_changes(max_tokens=8, stop_token_ids=(plain[0],), min_tokens=3)
    )
    assert plain[0] not in tokens(later)[:2] and len(tokens(later)) >= 3


def test_a_stop_string_cuts_the_text(make_service):
    service = make_service()
    text = "".join(d.text for d in run(service, [70, 71, 72], GREEDY.with_changes(max_tokens=30)))
    stop = text[8:10]
    cut = run(service, [70, 71, 72], GREEDY.with_changes(max_tokens=30, stop=(stop,)))
    assert "".join(d.text for d in cut) == text[: text.index(stop)]
    assert (cut[-1].finish_reason, cut[-1].stop_reason) == ("stop", stop)


def test_n_samples_differ_and_are_repeatable(make_service):
    service = make_service()
    params = SamplingParams(n=3, seed=11, max_tokens=8, ignore_eos=True)

    def samples():
        found = {0: [], 1: [], 2: []}
        for d in run(service, [9, 9], params):
            found[d.index] += d.token_ids
        return found

    first = samples()
    assert first == samples() and len({tuple(s) for s in first.values()}) == 3
    assert tokens(run(service, [9, 9], params.with_changes(n=1))) == first[0]


def test_logprobs_and_prompt_logprobs_do_not_depend_on_chunks(make_service):
    prompt = [(7 * i) % 320 for i in range(30)]
    params = GREEDY.with_changes(max_tokens=3, logprobs=2, prompt_logprobs=1)
    whole, chunked = (run(make_service(**s), prompt, params) for s in ({}, {"chunk_size": 4}))
    scored = whole[0].prompt_logprobs
    assert len(scored) == 30 and scored[0] is None and [e.token_id for e in scored[1:]] == prompt[1:]
    assert all(d.prompt_logprobs is None for d in whole[1:])
    for a, b in zip(scored[1:], chunked[0].prompt_logprobs[1:], strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4) and a.top[0][0] == b.top[0][0]
    for d in whole:
        assert d.logprobs[0].token_id == d.token_ids[0] == d.logprobs[0].top[0][0]


@pytest.mark.parametrize(
    ("prompt", "changes", "param"),
    [
        ([], {}, "prompt"),
        ([320], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([True], {}, "prompt"),
        ([1] * 256, {}, "prompt"),
        ([1] * 250, {"max_tokens": 7}, "max_tokens"),
        ([1], {"stop_token_ids": (999,)}, "stop_token_ids"),
        ([1], {"logit_bias": {999: 1.0}}, "logit_bias"),
        ([1], {"stop_token_ids": tuple(range(320)), "min_tokens": 2}, "min_tokens"),
    ],
)
def test_what_cannot_be_served_is_refused_before_it_is_queued(make_service, prompt, changes, param):
    service = make_service()
    with pytest.raises(RequestError, match=param) as error:
        service.submit(prompt, GREEDY.with_changes(**changes), listener=lambda d: None)
    assert error.value.param == param and service.stats().requests_total == 0


def test_a_full_queue_refuses_and_keeps_what_it_has(make_service):
    service = make_service(max_num_seqs=1, max_queue=2)
    ends = []
    params = GREEDY.with_changes(max_tokens=30)

    def submit():
        service.submit([3] * 50, params, listener=lambda d: ends.append(d.finish_reason))

    with service.at_once():
        for _ in range(2):
            submit()
        for _ in range(10):
            with pytest.raises(QueueFullError):
                submit()
    assert service.drain(60)
    assert ends.count("length") == 2


def test_prompts_of_one_call_run_in_one_step_however_long_submitting_takes(make_service, monkeypatch):
    service = make_service()
    submit, examine, rows = service.submit, service.runner.examine, []

    def slowly(*prompt, **options):
        time.sleep(0.05)
        return submit(*prompt, **options)

    def noted(items):
        rows.append(len(items))
        return examine(items)

    monkeypatch.setattr(service, "submit", slowly)
    monkeypatch.setattr(service.runner, "examine", noted)
    assert len(list(run_requests(service, [[5], [6], [7]], GREEDY.with_changes(max_tokens=2)))) == 6
    assert rows == [3, 3]


def test_callers_in_several_threads_wait_for_each_other_at_a_full_queue(make_service):
    service = make_service(max_num_seqs=1, max_queue=2)
    ends = []

    def call():
        for _, delta in run_requests(service, [[3] * 5] * 6, GREEDY.with_changes(max_tokens=3)):
            if delta.finish_reason is not None:
                ends.append(delta.finish_reason)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert ends == ["length"] * 24


def test_more_samples_than_the_queue_ever_takes_are_refused_for_good(make_service):
    service = make_service(max_queue=2)
    with pytest.raises(RequestError, match="max_queue") as error:
        run(service, [5], GREEDY.with_changes(max_tokens=2, n=3))
    assert error.value.param == "n"


def test_waiting_for_room_ends_with_the_service(make_service):
    service = make_service(max_num_seqs=1, max_queue=2)
    started, go_on = threading.Event(), threading.Event()

    def hold(delta):
        started.set()
        go_on.wait(60)

    service.submit([5], GREEDY.with_changes(max_tokens=2), listener=hold)
    assert started.wait(60)
    service.submit([5], GREEDY.with_changes(max_tokens=2), listener=lambda d: None)
    errors = []

    def call():
        try:
            run(service, [5], GREEDY.with_changes(max_tokens=2))
        except EngineDeadError as error:
            errors.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    closer = threading.Thread(target=service.close)
    closer.start()
    caller.join(60)
    go_on.set()
    closer.join(60)
    assert len(errors) == 1


def test_an_abort_is_not_for_a_later_request_of_the_same_name(make_service):
    service = make_service()
    held, go_on, ends, ended = threading.Event(), threading.Event(), [], threading.Event()

    def hold(delta):
        held.set()
        go_on.wait(60)

    def listen(delta):
        if delta.finish_reason is not None:
            ends.append(delta.finish_reason)
            ended.set()

    service.submit([5, 6], GREEDY.with_changes(max_tokens=2), listener=hold)
    assert held.wait(60)  # the engine is in a step: what comes now is taken together
    service.abort("name")
    service.submit([5, 6], GREEDY.with_changes(max_tokens=2), request_id="name", listener=listen)
    go_on.set()
    assert ended.wait(60) and ends == ["length"]


def test_who_hears_of_an_end_finds_it_counted_and_the_id_free(make_service):
    service = make_service()
    params, seen, answered = GREEDY.with_changes(max_tokens=3), [], threading.Event()

    def listen(delta):
        if delta.finish_reason is None:
            return
        seen.append(service.stats())
        if len(seen) == 1:
            service.submit([5, 6], params, request_id="name", listener=listen)
        else:
            answered.set()

    service.submit([5, 6], params, request_id="name", listener=listen)
    assert answered.wait(60)
    counted = [(s.generation_tokens_total, s.finished["length"], s.running, s.kv_pages_used) for s in seen]
    assert counted == [(3, 1, 0, 0), (6, 2, 0, 0)]


def test_a_listener_that_ends_its_thread_does_not_end_the_engine(make_service):
    service = make_service()

    def leave(delta):
        raise SystemExit(3)

    service.submit([5, 6], GREEDY.with_changes(max_tokens=2), listener=leave)
    assert service.drain(60)
    assert service.stats().kv_pages_used == 0 and service.stats().finished == {"abort": 1}
    assert service.health()["status"] == "ok"


def test_closing_a_stream_frees_its_pages(make_service):
    service = make_service()

    async def main():
        stream = service.stream([5] * 40, GREEDY)
        async for _ in stream:
            break
        await stream.aclose()

    hold_steps(service, lambda: service._intake._aborts, after=2)  # or it might run to its end before
    asyncio.run(main())
    assert service.drain(20)
    stats = service.stats()
    assert stats.kv_pages_used == 0 and stats.finished == {"abort": 1}


def test_a_row_that_is_not_finite_fails_alone(make_service):
    service = make_service()
    graphs = service._engine._runner.graphs
    run_graphs = graphs.run

    def broken(*args):
        hidden, logits = run_graphs(*args)
        logits[-1] = float("nan")
        return hidden, logits

    graphs.run = broken
    ends = {}
    done = threading.Semaphore(0)
    for name in ("a", "b"):

        def listener(delta, name=name):
            if delta.finish_reason:
                ends[name] = delta
                done.release()

        service.submit(
            [5] * (3 if name == "a" else 9),
            GREEDY.with_changes(max_tokens=1),
            request_id=name,
            listener=listener,
        )
    assert done.acquire(timeout=20) and done.acquire(timeout=20)
    reasons = sorted(d.finish_reason for d in ends.values())
    assert reasons in (["error", "length"], ["error", "error"])
    assert any("finite" in (d.error or "") for d in ends.values())
    graphs.run = run_graphs
    assert run(service, [1], GREEDY.with_changes(max_tokens=2))[-1].finish_reason == "length"


def test_failing_steps_end_their_requests_and_three_in_a_row_the_engine(make_service):
    service = make_service()

    def fail(*args):
        raise RuntimeError("planned failure")

    service._engine._runner.graphs.run = fail
    for _ in range(3):
        last = run(service, [1, 2], GREEDY)[-1]
        assert last.finish_reason == "error" and "planned failure" in last.error
    service._thread.join(20)
    assert (
        service.health()["status"] == "dead" and "planned failure" in service.health()["events"][0]["reason"]
    )
    with pytest.raises(EngineDeadError, match="planned failure"):
        service.submit([1], GREEDY, listener=lambda d: None)


def test_close_ends_what_runs_and_may_be_repeated(make_service):
    service = make_service()
    ends = []
    hold_steps(service, lambda: service._intake.closing, after=2)  # or it might run to its end before
    service.submit([5] * 40, GREEDY, listener=lambda d: ends.append(d.finish_reason))
    service.close()
    service.close()
    assert ends[-1] == "abort" and ends.count("abort") == 1
    with pytest.raises(EngineDeadError):
        service.submit([1], GREEDY, listener=lambda d: None)


def test_a_listener_that_raises_hurts_nobody_else(make_service, caplog):
    service = make_service()

    def bad(delta):
        raise ValueError("listener")

    service.submit([5] * 4, GREEDY.with_changes(max_tokens=9), listener=bad)
    assert len(tokens(run(service, [6], GREEDY.with_changes(max_tokens=9)))) == 9
    assert service.drain(20) and service.stats().kv_pages_used == 0


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"max_model_len": 100, "num_pages": 3}, "num_pages"),
        ({"max_model_len": 200, "kv_cache_memory": 5000}, "kv_cache_memory"),
        ({"max_model_len": 100000}, "max_model_len"),
        ({"device": "warp"}, "device"),
        ({"max_num_batched_tokens": 3}, "max_num_batched_tokens"),
        (
            {
                "kv_cache_memory": 2**60,
                "num_pages": None,
                "max_num_seqs": 2**40,
                "max_num_batched_tokens": 2**41,
            },
            "kv_cache_memory",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(make_service, settings, field):
    with pytest.raises(ConfigError, match=field) as error:
        make_service(**settings)
    assert error.value.field == field


def test_a_small_cache_shortens_the_context_with_a_warning(make_service, caplog):
    service = make_service(num_pages=5, page_size=8)
    assert service.max_model_len == 32 and "limited to 32 tokens" in caplog.text
    assert len(tokens(run(service, [1] * 20, GREEDY))) == 12


def test_the_model_runs_without_gradients(make_service):
    service = make_service()
    assert not any(p.requires_grad for p in service._engine._runner.programs.model.parameters())
    assert torch.is_grad_enabled()


def test_a_start_that_fails_late_leaves_no_process(make_service, monkeypatch):
    pids = []

    def fail(runner, *arguments):
        pids.append(runner.context().pid)
        os.kill(pids[0], 0)  # it is there
        raise MemoryError("planned failure")

    monkeypatch.setattr("piecework.engine.service.Engine", fail)
    with pytest.raises(MemoryError, match="planned failure"):
        make_service(workers="process", num_pages=40)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
