"""Runs a list of prompts on a service, and gathers what comes of them."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from queue import SimpleQueue
from typing import TYPE_CHECKING

from piecework.engine.outputs import Delta
from piecework.engine.results import Result
from piecework.errors import QueueFullError, RequestError
from piecework.sampling import SamplingParams

if TYPE_CHECKING:
    from piecework.engine.service import Service

Job = tuple[Sequence[int], SamplingParams]
"""A prompt's token ids and how it is sampled."""


def run_jobs(service: Service, jobs: Sequence[Job]) -> Generator[tuple[int, Delta], None, None]:
    """Yield (number of the job, delta) until every sample of every job has ended.

    As many jobs are submitted as the service's queue takes; the others follow as room comes. Closing the
    generator aborts what still runs. Raises RequestError, with the job's number from 1, for a refused one.
    """
    arrived: SimpleQueue[tuple[int, Delta]] = SimpleQueue()
    running: dict[int, str] = {}
    unfinished = [params.n for _, params in jobs]
    following = 0
    try:
        while True:
            while following < len(jobs):
                request_id = _submit(service, following, jobs[following], arrived, may_wait=bool(running))
                if request_id is None:
                    break
                running[following] = request_id
                following += 1
            if not running:
                return
            number, delta = arrived.get()
            if delta.finish_reason is not None:
                unfinished[number] -= 1
                if unfinished[number] == 0:
                    del running[number]
            yield number, delta
    finally:
        for request_id in running.values():
            service.abort(request_id)


def in_order(deltas: Iterable[tuple[int, Delta]], jobs: Sequence[Job]) -> Iterator[tuple[int, Result]]:
    """Yield each finished (job number, result) in the order of jobs and their samples."""
    results = [(number, Result(index=i)) for number, (_, params) in enumerate(jobs) for i in range(params.n)]
    places = {(number, result.index): result for number, result in results}
    following = 0
    for number, delta in deltas:
        places[number, delta.index].add(delta)
        while following < len(results) and results[following][1].finish_reason is not None:
            yield results[following]
            following += 1


def run_all(service: Service, jobs: Sequence[Job]) -> list[Result]:
    """Run all jobs together and return their results in order, n of them for a job with n samples."""
    with closing(run_jobs(service, jobs)) as deltas:
        return [result for _, result in in_order(deltas, jobs)]


def _submit(
    service: Service,
    number: int,
    job: Job,
    arrived: SimpleQueue[tuple[int, Delta]],
    *,
    may_wait: bool,
) -> str | None:
    """Submit one job; None where the queue is full and something runs that will make room."""
    prompt_ids, params = job
    try:
        return service.submit(prompt_ids, params, listener=lambda delta: arrived.put((number, delta)))
    except QueueFullError:
        if may_wait:
            return None
        raise
    except RequestError as error:
        raise RequestError(f"prompt {number + 1}: {error}", param=error.param, code=error.code) from error
