"""The engine on a worker process: the same tokens, and a death that ends requests and not the engine."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from tiny import PIECEWISE, save_tiny

from piecework import LLM
from piecework.errors import ConfigError, ModelError, WorkerLostError
from piecework.sampling import SamplingParams
from piecework.weights.source import resolve
from piecework.workers.process.messages import encode
from piecework.workers.serving.steps import ServingInfo

LIMIT = 300  # seconds, for a model to be loaded again on a machine that has other things to do
PROMPTS = [[5, 6, 7], [9] * 40, list(range(10, 30))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("qwen3"), "qwen3", tokenizer=True))


def answers(llm, prompts, max_tokens=12):
    greedy = llm.generate(
        prompts, temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=2, prompt_logprobs=1
    )
    drawn = llm.generate(
        prompts,
        temperature=0.9,
        max_tokens=max_tokens,
        ignore_eos=True,
        seed=3,
        n=2,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        min_tokens=2,
        logit_bias={7: 1.5},
    )
    return [(r.token_ids, r.logprobs, r.prompt_logprobs, r.text, r.finish_reason) for r in greedy + drawn]


def settings(**changes):
    return {"dtype": "float32", "threads": 1, "max_num_seqs": 8, "num_pages": 200, **changes}


@pytest.fixture(scope="module")
def expected(folder):
    with LLM(folder, **settings()) as llm:
        assert [worker.kind for worker in llm.service.workers()] == ["inline"]
        return answers(llm, PROMPTS)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, **settings(workers="process", profile=True)) as made:
        yield made
        (worker,) = made.service.workers()
    (closed,) = made.service.workers()
    assert closed.status == "closed" and not Path(f"/proc/{worker.pid}").exists()


def test_a_process_gives_the_same_tokens_and_probabilities(llm, expected):
    service = llm.service
    (worker,) = service.workers()
    assert worker.kind == "process" and worker.pid != os.getpid() and not hasattr(service.runner, "programs")
    assert answers(llm, PROMPTS) == expected
    counters = service.graph_counters()["body"]
    assert counters["traces"] == 1 and counters["chained_runs"] > 20
    timers = service.profile.snapshot()["timers"]
    assert timers["decode.run"]["count"] > 20 and timers["load.weights"]["count"] == 1
    (worker,) = service.workers()
    assert service.health()["workers"] == [worker.as_dict()] and service.health()["status"] == "ok"


def test_more_parameters_than_the_table_holds(llm):
    """4 * max_num_seqs places: what was thrown out is sent again."""
    params = [SamplingParams(temperature=0.0, max_tokens=1 + i % 3, ignore_eos=True) for i in range(70)]
    for own in [*params, *params]:
        (result,) = llm.generate([5, 6], own)
        assert len(result.token_ids) == own.max_tokens and result.finish_reason == "length"


def test_a_new_process_has_the_time_of_a_start_for_its_first_step(llm, expected):
    runner = llm.service.runner
    assert runner._deadlines.seconds(1) == 10  # from the steps that ran
    runner._take_info(encode(ServingInfo(runner.shape, {}, {}, ())))
    assert runner._deadlines.seconds(1) == llm.service.config.worker.start_timeout


def test_a_killed_worker_ends_what_runs_and_comes_back_for_what_waits(llm, expected):
    service = llm.service
    before = service.workers()[0]
    started, killed, ends = set(), [], {}
    all_there, ended = threading.Event(), threading.Semaphore(0)

    def listener(name):
        def listen(delta):  # on the engine's thread: no step runs meanwhile
            assert all_there.wait(LIMIT)
            started.add(name)
            if len(started) == 8 and not killed:
                killed.append(time.time())
                os.kill(before.pid, signal.SIGKILL)
            if delta.finish_reason is not None:
                ends[name] = (delta.finish_reason, delta.error, time.time())
                ended.release()

        return listen

    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    for number in range(12):  # 8 run, 4 wait
        service.submit([5 + number], params, listener=listener(number))
    all_there.set()
    for _ in range(12):
        assert ended.acquire(timeout=LIMIT)
    errors = {name: end for name, end in ends.items() if end[0] == "error"}
    assert len(errors) == 8 and sorted(end[0] for end in ends.values())[8:] == ["length"] * 4
    for _, error, _ in errors.values():
        assert f"process {before.pid}" in error and "was killed by SIGKILL" in error
    assert max(at for _, _, at in errors.values()) - killed[0] < LIMIT / 10
    after = service.workers()[0]
    assert (after.generation, after.restarts, after.status) == (
        before.generation + 1,
        before.restarts + 1,
        "ready",
    )
    assert after.pid != before.pid and "SIGKILL" in after.lost
    assert service.stats().kv_pages_used == 0
    assert answers(llm, PROMPTS) == expected


@pytest.mark.parametrize("mode", [pytest.param("piecewise"), pytest.param("full", marks=pytest.mark.slow)])
def test_captured_graphs_in_a_process(folder, expected, mode):
    config = {**PIECEWISE, "decode_graph": mode}
    with LLM(folder, **settings(device="sim", workers="process", compilation_config=config)) as llm:
        assert [(w.kind, w.device) for w in llm.service.workers()] == [("process", "sim")]
        found = answers(llm, PROMPTS)
        assert llm.service.graph_counters()["body"]["replays"] > 0
    assert [(tokens, reason) for tokens, *_, reason in found] == [
        (tokens, reason) for tokens, *_, reason in expected
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_with_another_device_behind_it_a_killed_worker_loses_no_request(folder, expected):
    device = {"device": "sim,cpu", "workers": "process", "compilation_config": PIECEWISE}
    with LLM(folder, **settings(**device)) as llm:
        (first,) = llm.service.workers()
        tokens, killed, done = [[] for _ in PROMPTS], [], threading.Semaphore(0)

        def listener(number):
            def listen(delta):
                tokens[number] += delta.token_ids
                if len(tokens[number]) == 4 and not killed:
                    killed.append(first.pid)
                    os.kill(first.pid, signal.SIGKILL)
                if delta.finish_reason is not None:
                    assert delta.finish_reason == "length", delta.error
                    done.release()

            return listen

        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        for number, prompt in enumerate(PROMPTS):
            llm.service.submit(prompt, params, listener=listener(number))
        for _ in PROMPTS:
            assert done.acquire(timeout=LIMIT)
        (second,) = llm.service.workers()
        assert (first.device, second.device, second.kind) == ("sim", "cpu", "process") and killed
        assert llm.service.health()["status"] == "degraded"
    assert tokens == [answer[0] for answer in expected[: len(PROMPTS)]]
    assert not any(Path(f"/proc/{worker.pid}").exists() for worker in (first, second))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_device_that_dies_while_nothing_runs_does_not_end_the_engine(folder, expected, monkeypatch):
    from piecework.workers.process import supervisor

    monkeypatch.setattr(supervisor, "delays", lambda: iter([0.01] * 10))
    with LLM(folder, **settings(device="sim,cpu", isolate=True)) as llm:
        runner = llm.service.runner
        runner._target = "child_hosts:Crashes"
        os.kill(llm.service.workers()[0].pid, signal.SIGKILL)
        while runner.failure() is None:
            time.sleep(0.01)
        assert llm.service.health()["status"] == "degraded"
        (result,) = llm.generate([PROMPTS[0]], temperature=0.0, max_tokens=12, ignore_eos=True)
        assert result.token_ids == expected[0][0], result.error
        assert llm.service.device_name == "cpu"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_requests_wait_for_a_restart_no_longer_than_they_may(folder, monkeypatch):
    from piecework.workers.process import supervisor

    monkeypatch.setattr(supervisor, "delays", lambda: iter([3600.0]))
    faults = "point=run,device=0,step=8,kind=abort;point=run,device=1,step=0,kind=abort"
    small = {"chunk_size": 8, "max_num_batched_tokens": 8, "max_failover_seconds": 30.0}
    device = {"device": "sim,cpu", "workers": "process", "inject_fault": faults}
    with LLM(folder, **settings(**device, **small)) as llm:
        results = llm.generate(PROMPTS, temperature=0.0, max_tokens=100, ignore_eos=True)
        errors = [result.error for result in results]
        assert all(result.finish_reason == "error" for result in results)
        assert any("max_failover_seconds=30" in error for error in errors), errors


@pytest.mark.slow
def test_what_is_wrong_with_the_settings_is_said_as_in_one_process(folder):
    with pytest.raises(ConfigError) as error:
        LLM(folder, **settings(workers="process", num_pages=2, max_model_len=100))
    assert error.value.field == "num_pages" and error.value.value == 2
    with pytest.raises(ModelError):
        LLM("no/such/model", workers="process")
    with pytest.raises(ConfigError, match="device='warp'"):
        LLM(folder, device="warp")
    with pytest.raises(ConfigError, match="step_timeout"):
        LLM(folder, step_timeout=0.0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_step_that_hangs_is_ended_and_close_does_not_wait_for_one(folder):
    with LLM(folder, **settings(workers="process", step_timeout=5.0)) as llm:
        pid = llm.service.workers()[0].pid
        os.kill(pid, signal.SIGSTOP)  # it hears nothing, not even SIGTERM
        (result,) = llm.generate([5], max_tokens=2, ignore_eos=True)
        assert result.finish_reason == "error" and "silent" in result.error
        (result,) = llm.generate([5], max_tokens=2, ignore_eos=True)
        assert result.finish_reason == "length"
        os.kill(llm.service.workers()[0].pid, signal.SIGSTOP)
        reasons = []
        llm.service.submit(
            [5], SamplingParams(max_tokens=9), listener=lambda d: reasons.append(d.finish_reason)
        )
    assert reasons[-1] in ("error", "abort")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_worker_that_dies_again_and_again_is_given_up(folder, monkeypatch):
    from piecework.workers.process import supervisor

    monkeypatch.setattr(supervisor, "delays", lambda: iter([0.01] * 10))
    with LLM(folder, **settings(workers="process")) as llm:
        runner = llm.service.runner
        runner._target = "child_hosts:Crashes"
        os.kill(llm.service.workers()[0].pid, signal.SIGKILL)
        while llm.service.workers()[0].status == "ready":  # a request that comes before is one that died
            time.sleep(0.01)
        (result,) = llm.generate([5], max_tokens=2)
        assert result.finish_reason == "error" and "restarts in a row failed" in result.error
        assert llm.service.health()["status"] == "dead"
        with pytest.raises(WorkerLostError):
            runner.execute([])


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_the_default_model(device):
    try:
        resolve("smollm2-135m")
    except ModelError as error:
        pytest.skip(f"the default model can't be had here: {error}")
    prompts = [[p % 49152 for p in range(7, 7 + 3001 * n, 3001)] for n in (3, 17, 40)]
    changes = {"device": device, "compilation_config": PIECEWISE} if device == "sim" else {}

    def tokens(workers):
        with LLM("smollm2-135m", **settings(workers=workers, max_model_len=256, **changes)) as llm:
            results = llm.generate(prompts, temperature=0.0, max_tokens=32, ignore_eos=True)
            assert (llm.service.graph_counters()["body"]["replays"] > 0) == (device == "sim")
            return [result.token_ids for result in results]

    assert tokens("process") == tokens("inline")
