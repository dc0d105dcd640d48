"""A request as an asynchronous iterator over its deltas."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from piecework.engine.outputs import Delta
from piecework.engine.request import Listener
from piecework.sampling import SamplingParams


class Door(Protocol):
    """Where requests go in."""

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        listener: Listener,
    ) -> str:
        """Queue a request and return its id."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request."""
        ...


async def stream_deltas(
    door: Door, prompt_ids: Sequence[int], params: SamplingParams, request_id: str | None
) -> AsyncIterator[Delta]:
    """Yield the deltas of a request; closing the iterator aborts what has not ended."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[Delta] = asyncio.Queue()

    def listener(delta: Delta) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            loop.call_soon_threadsafe(queue.put_nowait, delta)

    used = door.submit(prompt_ids, params, request_id=request_id, listener=listener)
    open_samples = params.n
    try:
        while open_samples:
            delta = await queue.get()
            open_samples -= delta.finish_reason is not None
            yield delta
    finally:
        if open_samples:
            door.abort(used)
