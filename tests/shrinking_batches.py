"""Greedy runs whose batches shrink from six sequences to one, so that each size costs few steps."""

from __future__ import annotations

import random
from typing import Any

from piecework import LLM
from piecework.engine.offline import run_requests
from piecework.engine.result import Result

CAPTURED = [1, 2, 4]
"""Sizes of decode steps; batches of 3 are between two of them, those of 5 and 6 above the largest."""
PREFILLS = [4, 16, 48]
"""Sizes of prefill steps; the prompts alone are padded to each of them, all together are above."""


def prompts(vocabulary: int) -> list[list[int]]:
    """Six prompts of random tokens; the last is prefilled in two steps of 64 tokens."""
    rng = random.Random(3)
    return [[rng.randrange(vocabulary) for _ in range(n)] for n in (7, 16, 1, 40, 33, 90)]


def generate(llm: LLM, vocabulary: int, max_tokens: int, **changes: Any) -> list[Result]:
    """Results of three small batches and of all prompts, of which each ends before the next.

    The last has `max_tokens`, the others ever fewer.
    """
    made = prompts(vocabulary)
    apart = max(1, max_tokens // 8)
    rounds = [
        ([made[2]], [2]),
        ([made[0]], [2]),
        (made[:2], [2, 2]),
        (made, [max_tokens - apart * n for n in range(5, -1, -1)]),
    ]
    results = []
    for batch, counts in rounds:
        fixed = llm.service.default_params.with_changes(temperature=0.0, ignore_eos=True, **changes)
        params = [fixed.with_changes(max_tokens=count) for count in counts]
        found = [Result(index=0) for _ in batch]
        for number, delta in run_requests(llm.service, batch, params):
            found[number].add(delta)
        results += found
    return results
