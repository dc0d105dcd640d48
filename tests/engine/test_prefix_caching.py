"""Prefix reuse in the engine: tokens are those of a cold run, and usage says what was not computed."""

from __future__ import annotations

import random
import threading

import pytest

from piecework import LLM
from piecework.config import EngineConfig
from piecework.engine.engine import Engine
from piecework.engine.offline import in_order, run_requests
from piecework.kvcache import PagePool
from piecework.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def results(service, prompts, params=GREEDY):
    samples = [params.n] * len(prompts)
    return [result for _, result in in_order(run_requests(service, prompts, params), samples)]


@pytest.fixture(scope="module")
def prompts():
    rng = random.Random(3)
    shared = [rng.randrange(320) for _ in range(100)]
    return [shared + [rng.randrange(320) for _ in range(rng.choice([1, 5, 30]))] for _ in range(32)]


@pytest.fixture(scope="module")
def cold(folder, prompts):
    with LLM(str(folder), dtype="float32", threads=1, prefix_caching=False) as llm:
        found = results(llm.service, prompts)
        stats = llm.service.stats()
    assert stats.prefix_hits_total == stats.kv_pages_cached == 0
    assert not any(result.usage.cached_tokens for result in found)
    return [result.token_ids for result in found]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"chunk_size": 7},
        {"page_size": 1},
        {"page_size": 4, "num_pages": 46, "max_num_seqs": 8},
        {"compilation_config": {"chain": False}},
    ],
    ids=str,
)
def test_requests_that_share_a_beginning_get_what_they_get_cold(make_service, prompts, cold, settings):
    service = make_service(**settings)
    found = results(service, prompts)
    assert [result.token_ids for result in found] == cold
    size = settings.get("page_size", 16)
    known = 100 // size * size
    assert [result.usage.cached_tokens >= known for result in found] == [False] + [True] * 31
    stats = service.stats()
    assert stats.prefix_hits_total >= 31 and stats.prefix_cached_tokens_total >= 31 * known
    assert stats.kv_pages_used == 0 and stats.kv_pages_cached > 0
    if "num_pages" in settings:
        assert stats.preemptions_total > 0 and stats.prefix_evictions_total > 0


def test_a_chat_goes_on_behind_what_was_generated(make_service, prompts):
    service, other = make_service(), make_service(prefix_caching=False)
    history, before = list(prompts[0]), 1
    for _ in range(3):
        (answer,), (wanted,) = results(service, [history]), results(other, [history])
        assert answer.token_ids == wanted.token_ids
        # All full pages of the turn before; the last token that it drew was never computed.
        assert answer.usage.cached_tokens == (before - 1) // 16 * 16
        before = len(history) + len(answer.token_ids)
        history += [*answer.token_ids, 7, 8, 9]


def test_samples_of_one_prompt_share_its_pages(make_service, prompts):
    params = GREEDY.with_changes(n=4, temperature=0.8, seed=5)
    found = results(make_service(), [prompts[0]], params)
    wanted = results(make_service(prefix_caching=False), [prompts[0]], params)
    assert [r.token_ids for r in found] == [r.token_ids for r in wanted]
    known = (len(prompts[0]) - 1) // 16 * 16
    assert [r.usage.cached_tokens for r in found] == [0, known, known, known]


def test_log_probabilities_of_a_prompt_are_computed_and_then_reused(make_service, prompts):
    service = make_service()
    params = GREEDY.with_changes(prompt_logprobs=1)
    before = results(service, [prompts[0]])[0]
    asked = results(service, [prompts[0]], params)[0]
    assert asked.usage.cached_tokens == 0 and len(asked.prompt_logprobs) == len(prompts[0])
    assert asked.token_ids == before.token_ids
    assert results(service, [prompts[0]])[0].usage.cached_tokens > 0


def test_cancels_leave_no_page_behind(make_service, prompts):
    service = make_service(num_pages=60)
    ended = threading.Semaphore(0)

    def listener(delta):
        if delta.finish_reason is not None:
            ended.release()

    rng = random.Random(1)
    ids = [service.submit(p, GREEDY, listener=listener) for p in prompts]
    for request_id in rng.sample(ids, 12):
        service.abort(request_id)
    for _ in prompts:
        assert ended.acquire(timeout=60)
    assert service.drain(20)
    stats = service.stats()
    assert stats.kv_pages_used == 0 and sum(stats.finished.values()) == 32


def test_a_restart_without_the_cache_computes_everything_again(make_service, prompts, cold):
    """What is done where another device takes over: its cache knows nothing."""
    service = make_service()
    results(service, prompts[:2])
    engine = Engine(service.runner, EngineConfig.from_flat({}))
    scheduler = engine.scheduler
    requests = [
        service._admission.requests(str(i), p, GREEDY, 0, lambda delta: None)[0]
        for i, p in enumerate(prompts[:4])
    ]
    for request in requests:
        engine.add(request)
    for _ in range(6):
        engine.step()
    assert len(scheduler.tree) > 0 and len(scheduler.running) == 4
    before, engine.pool = engine.pool, PagePool(service.runner.cache.num_pages)
    scheduler.restart(engine.pool, service.runner.cache.page_size)
    assert before.used == len(scheduler.tree) == 0 and len(scheduler.waiting) == 4
    for tensor in service.runner.cache.tensors().values():
        tensor.zero_()
    while engine.has_work:
        engine.step()
    assert [request.output_ids for request in requests] == cold[:4]
    scheduler.tree.clear()
    assert engine.pool.used == 0
