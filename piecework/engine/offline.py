"""Runs a list of prompts on a service and hands their deltas over as they come."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import nullcontext
from queue import SimpleQueue
from typing import TYPE_CHECKING

from piecework.engine.outputs import Delta
from piecework.engine.result import Result
from piecework.errors import QueueFullError, RequestError
from piecework.sampling import SamplingParams

if TYPE_CHECKING:
    from piecework.engine.service import Service


def run_requests(
    service: Service,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    parallel: int | None = None,
) -> Generator[tuple[int, Delta], None, None]:
    """Yield (number of the prompt, delta) until every sample of every prompt has ended.

    `params` are for all prompts, or one for each. As many are submitted at once as the service's queue
    takes, but no more than `parallel`; the others follow as room comes. Where nothing else runs, the batches
    of those that fit at once, and so each bit of their numbers, are the same each time. Closing the iterator
    aborts what still runs. Raises RequestError, with the prompt's number, for a refused prompt.
    """
    arrived: SimpleQueue[tuple[int, Delta]] = SimpleQueue()
    running: dict[int, str] = {}
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    unfinished = [own.n for own in each]
    most = len(prompts) if parallel is None else max(parallel, 1)
    following = 0
    try:
        while running or following < len(prompts):
            with service.at_once() if following < len(prompts) else nullcontext():
                while following < len(prompts) and len(running) < most:
                    prompt, own = prompts[following], each[following]
                    request_id = _submit(service, following, prompt, own, arrived)
                    if request_id is None:
                        break
                    running[following] = request_id
                    following += 1
            if not running:
                service.wait_for_room(each[following].n)  # others fill the queue, nothing of ours will end
                continue
            number, delta = arrived.get()
            if delta.finish_reason is not None:
                unfinished[number] -= 1
                if unfinished[number] == 0:
                    del running[number]
            yield number, delta
    finally:
        for request_id in running.values():
            service.abort(request_id)


def in_order(deltas: Iterable[tuple[int, Delta]], samples: Sequence[int]) -> Iterator[tuple[int, Result]]:
    """Yield each finished (number of the prompt, result) in the order of prompts and their samples.

    `samples` is the number of samples of each prompt.
    """
    results = [(number, Result(index=index)) for number, n in enumerate(samples) for index in range(n)]
    places = {(number, result.index): result for number, result in results}
    following = 0
    for number, delta in deltas:
        places[number, delta.index].add(delta)
        while following < len(results) and results[following][1].finish_reason is not None:
            yield results[following]
            following += 1


def _submit(
    service: Service,
    number: int,
    prompt: Sequence[int],
    params: SamplingParams,
    arrived: SimpleQueue[tuple[int, Delta]],
) -> str | None:
    """Submit one prompt; None where the queue is full for now."""
    try:
        return service.submit(prompt, params, listener=lambda delta: arrived.put((number, delta)))
    except QueueFullError:
        return None
    except RequestError as error:
        raise RequestError(f"prompt {number + 1}: {error}", param=error.param, code=error.code) from error
