"""Several children with the same model: the same tokens, the least busy one is asked, a death is its own."""

from __future__ import annotations

import inspect
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from tiny import PIECEWISE, save_tiny

from piecework import LLM, EngineConfig
from piecework.engine.data_parallel import DataParallel, child_config
from piecework.engine.service import Service
from piecework.errors import ConfigError, EngineDeadError, ModelError, RequestError
from piecework.sampling import SamplingParams
from piecework.server.metrics import ServerMetrics
from piecework.weights.source import resolve

LIMIT = 300  # seconds, for a model to be loaded again on a machine that has other things to do
PROMPTS = [[5, 6, 7], [9] * 40, list(range(10, 30)), [8]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("qwen3"), "qwen3", tokenizer=True))


def settings(**changes):
    return {"dtype": "float32", "threads": 1, "max_num_seqs": 8, "num_pages": 200, **changes}


def answers(llm):
    greedy = llm.generate(PROMPTS, temperature=0.0, max_tokens=12, ignore_eos=True)
    drawn = llm.generate(PROMPTS, temperature=0.9, max_tokens=12, ignore_eos=True, n=2)
    return [(r.token_ids, r.text, r.finish_reason) for r in greedy + drawn]


@pytest.fixture(scope="module")
def expected(folder):
    with LLM(folder, **settings()) as llm:
        return answers(llm)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, **settings(data_parallel_size=2, profile=True)) as made:
        yield made
        pids = [worker.pid for worker in made.service.workers()]
    assert [worker.status for worker in made.service.workers()] == ["closed"] * 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    with pytest.raises(EngineDeadError):
        made.service.submit([5], SamplingParams(), listener=print)
    made.close()


def until(check):
    end = time.time() + LIMIT
    while not check():
        assert time.time() < end, "it did not come true in time"
        time.sleep(0.01)


def test_two_children_give_the_tokens_of_one_engine(llm, expected):
    service = llm.service
    assert isinstance(service, DataParallel)
    assert answers(llm) == expected
    first, second = service.workers()
    assert (first.name, second.name, first.kind) == ("dp0", "dp1", "process") and first.pid != second.pid
    steps = [one.stats().steps_total for one in service._services]
    assert min(steps) > 10 and service.stats().steps_total == sum(steps)
    assert service.stats().finished == {"length": 12} and service.stats().requests_total == 12
    assert service.graph_counters()["body"]["traces"] == 2  # each has its own programs
    assert service.profile.snapshot()["timers"]["load.weights"]["count"] == 2
    assert service.health()["status"] == "ok" and service.pending_tokens() == [0, 0]
    metrics = ServerMetrics(service).text().decode()
    assert 'piecework_worker_up{worker="dp1"} 1.0' in metrics
    assert 'piecework_worker_pending_tokens{worker="dp0"} 0.0' in metrics


def test_a_request_goes_to_the_child_with_the_fewest_pending_tokens(llm):
    service, ended = llm.service, threading.Semaphore(0)
    pids = [worker.pid for worker in service.workers()]

    def submit(prompt, tokens, **changes):
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, **changes)
        wait = lambda delta: delta.finish_reason is not None and ended.release()  # noqa: E731
        return service.submit([7] * prompt, params, listener=wait)

    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        seen = []
        for prompt, tokens in ((40, 10), (5, 5), (10, 20), (1, 20)):
            submit(prompt, tokens)
            seen.append(service.pending_tokens())
        assert seen == [[50, 0], [50, 10], [50, 40], [50, 61]]
        both = submit(2, 3, n=2)  # samples of a request stay together
        assert service.pending_tokens() == [60, 61]
        with pytest.raises(RequestError, match="in use by a running request"):
            service.submit([5], SamplingParams(), request_id=both, listener=print)
        with pytest.raises(RequestError, match="prompt is empty"):
            service.submit([], SamplingParams(), listener=print)
        assert service.pending_tokens() == [60, 61]
        assert [worker.pending_tokens for worker in service.workers()] == [60, 61]
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    service.abort(both)
    for _ in range(6):
        assert ended.acquire(timeout=LIMIT)
    assert service.pending_tokens() == [0, 0]


def test_the_death_of_a_child_ends_its_requests_alone(llm, expected):
    service = llm.service
    victim, other = service.workers()
    ends, begun, ended = {}, set(), threading.Semaphore(0)

    def listener(number):
        def listen(delta):  # on the thread of the request's engine: the next step meets the death
            if number % 2 == 0 and number not in begun:
                begun.add(number)
                if len(begun) == 2:
                    os.kill(victim.pid, signal.SIGKILL)
            if delta.finish_reason is not None:
                ends[number] = (delta.finish_reason, delta.error)
                ended.release()

        return listen

    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    with service.at_once():
        for number in range(4):  # each child has every other one
            service.submit([5 + number], params, listener=listener(number))
    for _ in range(4):
        assert ended.acquire(timeout=LIMIT)
    assert sorted(reason for reason, _ in ends.values()) == ["error", "error", "length", "length"]
    for reason, error in ends.values():
        assert (
            reason == "length" or f"dp0 (process {victim.pid}, generation 0) was killed by SIGKILL" in error
        )
    (event,) = service.health()["events"]
    assert event["worker"] == "dp0" and "SIGKILL" in event["reason"]
    (result,) = llm.generate([5], temperature=0.0, max_tokens=12, ignore_eos=True)  # by whoever is there
    assert result.finish_reason == "length"
    until(lambda: service.workers()[0].status == "ready")
    after = service.workers()
    assert (after[0].generation, after[0].restarts, after[1].pid) == (1, 1, other.pid)
    assert service.health()["status"] == "ok" and service.pending_tokens() == [0, 0]
    assert answers(llm)[:4] == expected[:4]


def test_it_has_what_a_service_has():
    def methods(cls):
        found = inspect.getmembers(cls, inspect.isfunction)
        return {name: inspect.signature(method) for name, method in found if not name.startswith("_")}

    own = methods(DataParallel)
    assert {name: own.get(name) for name in methods(Service)} == methods(Service)
    properties = {name for name, _ in inspect.getmembers(Service, lambda one: isinstance(one, property))}
    assert properties <= {name for name, _ in inspect.getmembers(DataParallel)}


def test_children_share_the_threads_and_have_a_device_each(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)), raising=False)

    def child(rank, **changes):
        return child_config(EngineConfig.from_flat({"data_parallel_size": 2, **changes}), rank)

    first = child(0, device="cuda")
    assert (first.worker.workers, first.worker.data_parallel_size) == ("process", 1)
    assert (first.device.device, child(1, device="cuda").device.device) == ("cuda:0", "cuda:1")
    assert [child(rank, device="npu:2").device.device for rank in (0, 1)] == ["npu:2", "npu:3"]
    assert child(1, device="sim:host").device.device == "sim:host"
    assert child(1, threads=5).device.threads == 5
    monkeypatch.setattr("torch.get_num_threads", lambda: 64)  # of OMP_NUM_THREADS, say
    assert child(1).device.threads == 3
    many = EngineConfig.from_flat({"data_parallel_size": 10_000})
    assert child_config(many, 0).device.threads == 1
    with pytest.raises(ConfigError, match="device='cuda,cpu' is not allowed: one device where"):
        child(0, device="cuda,cpu")
    with pytest.raises(ConfigError, match="audit_device='cpu' is not allowed: none where"):
        child(0, device="sim", audit_device="cpu")
    with pytest.raises(ConfigError, match="workers='inline' is not allowed: process or auto"):
        EngineConfig.from_flat({"workers": "inline", "data_parallel_size": 2})
    with pytest.raises(ConfigError, match="data_parallel_size=2 is not allowed: 1 where one engine"):
        Service(EngineConfig.from_flat({"data_parallel_size": 2}))
    with pytest.raises(ModelError):
        LLM("no/such/model", data_parallel_size=2)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_default_model():
    try:
        resolve("smollm2-135m")
    except ModelError as error:
        pytest.skip(f"the default model can't be had here: {error}")
    prompts = [[p % 49152 for p in range(7, 7 + 3001 * n, 3001)] for n in (3, 17, 40)]

    def tokens(**changes):
        with LLM("smollm2-135m", **settings(max_model_len=256, **changes)) as llm:
            results = llm.generate(prompts, temperature=0.0, max_tokens=16, ignore_eos=True)
            counters = llm.service.graph_counters()["body"]
            assert (counters["replays"] > 0) == ("device" in changes)
            assert min(w.pid is not None for w in llm.service.workers())
            return [result.token_ids for result in results]

    expected = tokens()
    assert tokens(data_parallel_size=2) == expected
    assert tokens(data_parallel_size=2, device="sim", compilation_config=PIECEWISE) == expected
