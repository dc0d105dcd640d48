"""What a request gets does not depend on what runs beside it, on chunks, or on preemption."""

from __future__ import annotations

import random
import threading
import time

import pytest

from piecework.engine.offline import run_requests
from piecework.sampling import SamplingParams

COUNT = 64


@pytest.fixture(scope="module")
def requests():
    rng = random.Random(7)
    prompts = [
        [rng.randrange(320) for _ in range(rng.choice([1, 2, 15, 16, 17, 40, 90]))] for _ in range(COUNT)
    ]
    params = []
    for i in range(COUNT):
        greedy = {"temperature": 0.0}
        sampled = {"temperature": 0.8, "top_p": 0.9, "seed": i, "repetition_penalty": 1.1}
        params.append(
            SamplingParams(max_tokens=rng.randint(1, 24), ignore_eos=True, **(greedy if i % 3 else sampled))
        )
    return list(zip(prompts, params, strict=True))


@pytest.fixture(scope="module")
def alone(requests, folder):
    from piecework.config import EngineConfig
    from piecework.engine.service import Service

    service = Service(EngineConfig.from_flat({"model": str(folder), "dtype": "float32", "threads": 1}))
    outputs = []
    for prompt, params in requests:
        outputs.append([t for _, d in run_requests(service, [prompt], params) for t in d.token_ids])
    service.close()
    return outputs


def run_at_random(service, requests):
    """Submit from several threads at random moments; return the tokens of each request."""
    tokens = [[] for _ in requests]
    ended = threading.Semaphore(0)
    finishes = [0] * len(requests)

    def submit(numbers):
        rng = random.Random(numbers[0])
        for i in numbers:
            time.sleep(rng.random() * 0.02)
            prompt, params = requests[i]

            def listener(delta, i=i):
                tokens[i] += delta.token_ids
                if delta.finish_reason is not None:
                    finishes[i] += 1
                    ended.release()

            service.submit(prompt, params, listener=listener)

    order = list(range(len(requests)))
    random.Random(1).shuffle(order)
    threads = [threading.Thread(target=submit, args=(order[k::4],)) for k in range(4)]
    for thread in threads:
        thread.start()
    for _ in requests:
        assert ended.acquire(timeout=60)
    assert finishes == [1] * len(requests)
    return tokens


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"chunk_size": 1},
        {"chunk_size": 7, "max_num_seqs": 5},
        {"chunk_size": 64, "max_num_batched_tokens": 70},
        {"page_size": 1},
        {"page_size": 4, "num_pages": 40, "max_num_seqs": 16},
    ],
    ids=str,
)
def test_64_requests_at_random_get_what_they_get_alone(make_service, requests, alone, settings):
    service = make_service(**settings)
    assert run_at_random(service, requests) == alone
    stats = service.stats()
    assert stats.kv_pages_used == stats.running == stats.waiting == 0
    assert stats.finished == {"length": COUNT}
    if "num_pages" in settings:
        assert stats.preemptions_total > 0
