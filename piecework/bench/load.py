"""Sends requests at a rate, with a limit on those in flight, and keeps what became of each."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from piecework.bench.client import Outcome
from piecework.bench.datasets import BenchRequest
from piecework.profile import now

Send = Callable[[BenchRequest], Awaitable[Outcome]]


@dataclass(frozen=True)
class Load:
    """The outcomes in the order of their requests, the seconds that all took, and the most in flight."""

    outcomes: list[Outcome]
    duration: float
    peak: int


def arrival_times(count: int, rate: float, seed: int) -> list[float]:
    """Return when each request is sent: a Poisson process of `rate` a second, or all at 0 for inf."""
    if math.isinf(rate):
        return [0.0] * count
    rng = random.Random(seed)
    times, at = [], 0.0
    for _ in range(count):
        times.append(at)
        at += rng.expovariate(rate)
    return times


async def drive(
    send: Send,
    requests: Sequence[BenchRequest],
    *,
    rate: float = math.inf,
    max_concurrency: int | None = None,
    seed: int = 0,
    on_done: Callable[[Outcome], None] = lambda outcome: None,
) -> Load:
    """Send every request at its time; one that finds `max_concurrency` in flight waits, and its clock too."""
    limit = asyncio.Semaphore(max_concurrency) if max_concurrency else None
    flying = peak = 0

    async def one(request: BenchRequest, at: float) -> Outcome:
        nonlocal flying, peak
        await asyncio.sleep(max(0.0, start + at - now()))
        async with AsyncExitStack() as stack:
            if limit is not None:
                await stack.enter_async_context(limit)
            flying += 1
            peak = max(peak, flying)
            outcome = await send(request)
            flying -= 1
        on_done(outcome)
        return outcome

    start = now()
    times = arrival_times(len(requests), rate, seed)
    outcomes = await asyncio.gather(*(one(r, at) for r, at in zip(requests, times, strict=True)))
    return Load(list(outcomes), now() - start, peak)
