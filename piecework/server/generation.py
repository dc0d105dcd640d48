"""One HTTP request's prompts in the engine: submitted together, read as one stream, aborted together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from piecework.engine.outputs import Delta
from piecework.sampling import SamplingParams
from piecework.server.errors import ApiError

if TYPE_CHECKING:
    from piecework.engine.service import Service


@dataclass(frozen=True)
class Job:
    """One prompt with its sampling parameters."""

    prompt_ids: Sequence[int]
    params: SamplingParams


class Generation:
    """The running jobs of one HTTP request. Whoever makes one closes it, which aborts what still runs.

    `submit` raises before anything is sent to the client, so that a full queue is a 429 and not a
    broken stream. Must be made and used in the event loop; the engine's thread only calls `_listen`.
    """

    def __init__(self, service: Service, request_id: str, jobs: Sequence[Job]) -> None:
        self._service = service
        self._jobs = jobs
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Delta] | ApiError] = asyncio.Queue()
        self._ids = [f"{request_id}-{i}" for i in range(len(jobs))]
        self._open: dict[int, int] = {}  # job -> samples that have not ended

    def submit(self) -> None:
        """Hand all jobs to the engine, or none: RequestError, QueueFullError, EngineDeadError."""
        try:
            with self._service.at_once():
                for i, job in enumerate(self._jobs):
                    listener, request_id = self._listener(i), self._ids[i]
                    self._open[i] = job.params.n
                    self._service.submit(job.prompt_ids, job.params, request_id=request_id, listener=listener)
        except BaseException:
            self.close()
            raise

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """Yield (job, delta) until every sample ended. Raises ApiError where the engine gave one up."""
        while self._open:
            item = await self._queue.get()
            if isinstance(item, ApiError):
                raise item
            i, delta = item
            if delta.finish_reason is not None:
                self._open[i] -= 1
                if not self._open[i]:
                    del self._open[i]
                if delta.finish_reason in ("error", "abort"):
                    raise _given_up(delta)
            yield i, delta

    def cancel(self, error: ApiError) -> None:
        """End it from the server's side: whoever reads `deltas` gets `error`."""
        self._queue.put_nowait(error)

    def close(self) -> None:
        """Abort what still runs. Safe to call more than once."""
        for i in list(self._open):
            del self._open[i]
            self._service.abort(self._ids[i])

    def _listener(self, i: int) -> Callable[[Delta], None]:
        def listen(delta: Delta) -> None:
            # A loop that closed has nobody left to tell; the engine's thread must not fail from it.
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._queue.put_nowait, (i, delta))

        return listen


def _given_up(delta: Delta) -> ApiError:
    if delta.finish_reason == "abort":
        return ApiError(503, "the request was aborted by the server", code="aborted")
    return ApiError(500, f"the engine failed: {delta.error or 'no reason given'}", code="engine_error")
