"""Whether the server takes requests, which ones are in it, and how it comes to rest."""

from __future__ import annotations

import asyncio

from piecework.server.errors import ApiError
from piecework.server.generation import Generation


class Lifecycle:
    """Shared by middleware, routes and the process: requests in flight, and the switch to draining."""

    def __init__(self) -> None:
        self.draining = False
        self._in_flight = 0
        self._generations: set[Generation] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        """HTTP requests whose answer is not complete."""
        return self._in_flight

    def enter(self) -> None:
        """A request came in."""
        self._in_flight += 1
        self._idle.clear()

    def leave(self) -> None:
        """A request was answered, or its client left."""
        self._in_flight -= 1
        if not self._in_flight:
            self._idle.set()

    def started(self, generation: Generation) -> None:
        """Remember a generation, so that a drain that takes too long can end it."""
        self._generations.add(generation)

    def finished(self, generation: Generation) -> None:
        """Close a generation and forget it."""
        generation.close()
        self._generations.discard(generation)

    async def drain(self, timeout: float) -> int:
        """Refuse new requests and wait for the others; return how many had to be cut off."""
        self.draining = True
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            cut = self._in_flight
            for generation in list(self._generations):
                generation.cancel(ApiError(503, "the server shut down before the end", code="shutdown"))
            return cut
        return 0
