"""Requests of all kinds that run when their device fails, and how they came to the next one."""

from __future__ import annotations

from between_steps import asked_after

from piecework.config import EngineConfig
from piecework.engine.offline import run_requests
from piecework.engine.service import Service
from piecework.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=10)
SEEDED = GREEDY.with_changes(temperature=0.9, top_p=0.95, seed=11, repetition_penalty=1.1, n=2)
LONG = [7 + i % 90 for i in range(40)]
PROMPTS = [LONG, [5, 6, 7], [8, 9], [*LONG[:33], 3, 4]]
SCORED = GREEDY.with_changes(prompt_logprobs=2, logprobs=2)
PARAMS = [SCORED, GREEDY.with_changes(max_tokens=6), SEEDED, GREEDY]
SMALL = {
    "chunk_size": 16,
    "num_pages": 80,
    "compilation_config": {
        "decode_capture_sizes": [1, 4],
        "prefill_capture_sizes": [16],
        "enable_debug_mode": True,  # which counts pages after each step
    },
}


def collect(service, prompts=PROMPTS, params=PARAMS, then=None):
    """Tokens of each sample and log probabilities of prompts; see `asked_after` for `then`."""
    tokens, scored = {}, {}
    with asked_after(service, then or {}):
        for number, delta in run_requests(service, prompts, params):
            assert delta.finish_reason in (None, "length"), delta.error
            tokens.setdefault((number, delta.index), []).extend(delta.token_ids)
            if delta.prompt_logprobs is not None:
                known = [one and (one.token_id, round(one.logprob, 3)) for one in delta.prompt_logprobs]
                scored[number] = known
    return tokens, scored


def undisturbed(folder, *batches):
    """What `collect` gives for each batch, its arguments, on a CPU that never fails."""
    service = Service(
        EngineConfig.from_flat({"model": str(folder), "dtype": "float32", "threads": 1, **SMALL})
    )
    found = [collect(service, *batch) for batch in batches]
    service.close()
    return found


def the_takeover(service):
    (carriage,) = service.pauses().carriages
    (shown,) = service.health()["takeovers"]
    assert shown["reason"] == carriage.reason and shown["device"] == carriage.device
    pauses = service.pauses()
    assert (pauses.copied_tokens, pauses.computed_tokens) == (
        carriage.copied_tokens,
        carriage.computed_tokens,
    )
    return carriage
