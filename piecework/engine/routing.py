"""Which of several engines gets a request: the one with the fewest tokens to compute."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from piecework.engine.outputs import Delta
from piecework.engine.request import Listener
from piecework.engine.service import Service
from piecework.errors import RequestError
from piecework.sampling import SamplingParams

_PREFERRED = {"ready": 0, "restarting": 1}
"""Requests wait for an engine that restarts where no other takes them; all else is worse."""


@dataclass(eq=False)
class _Load:
    """What an engine has to do: `pending` tokens, at most, since a request may stop early."""

    service: Service
    pending: int = 0

    @property
    def preference(self) -> tuple[int, int]:
        """The smaller, the sooner it gets the next request."""
        (worker,) = self.service.workers()
        return _PREFERRED.get(worker.status, len(_PREFERRED)), self.pending


@dataclass(eq=False)
class _Placed:
    """A request of an engine. `left` are the pending tokens of each sample that has not ended."""

    load: _Load
    prompt: int
    left: dict[int, int]
    untouched: set[int]

    def take(self, delta: Delta) -> None:
        """Count what a delta brings; the first one of a sample says that its prompt was computed."""
        index, done = delta.index, len(delta.token_ids)
        if index in self.untouched:
            self.untouched.discard(index)
            done += self.prompt
        if delta.finish_reason is not None:
            done = self.left[index]
        self.left[index] -= done
        self.load.pending -= done
        if delta.finish_reason is not None:
            del self.left[index]


class Router:
    """Knows which engine has which request. Safe from many threads.

    Its lock is never held while an engine's is taken, whose thread takes them in the other order.
    """

    def __init__(self, services: Sequence[Service]) -> None:
        self._loads = [_Load(service) for service in services]
        self._placed: dict[str, _Placed] = {}
        self._lock = threading.Lock()

    def place(
        self,
        request_id: str,
        prompt_tokens: int,
        params: SamplingParams,
        refused_by: Collection[Service],
        listener: Listener,
    ) -> tuple[Service, Listener]:
        """Return the engine that shall have the request, and the listener that counts for `listener`.

        Raises:
            RequestError: a request that has not ended has this id.
        """
        with self._lock:
            if request_id in self._placed:
                raise RequestError(
                    f"request_id={request_id!r} is in use by a running request", param="request_id"
                )
            load = self._next(refused_by)
            room = max(0, load.service.max_model_len - prompt_tokens)
            tokens = prompt_tokens + (room if params.max_tokens is None else params.max_tokens)
            samples = range(params.n)
            placed = _Placed(load, prompt_tokens, dict.fromkeys(samples, tokens), set(samples))
            load.pending += tokens * params.n
            self._placed[request_id] = placed
        return load.service, self._counting(placed, request_id, listener)

    def withdraw(self, request_id: str) -> None:
        """The engine that was chosen does not take it."""
        with self._lock:
            placed = self._placed.pop(request_id)
            placed.load.pending -= sum(placed.left.values())

    def holder(self, request_id: str) -> Service | None:
        """Return the engine that has an open request, None where there is no such request."""
        with self._lock:
            placed = self._placed.get(request_id)
        return None if placed is None else placed.load.service

    def next(self) -> Service:
        """Return the engine that would be asked first now."""
        with self._lock:
            return self._next(()).service

    def pending_tokens(self) -> list[int]:
        """Return the tokens, of prompts and answers, that each engine has yet to compute, at most."""
        with self._lock:
            return [load.pending for load in self._loads]

    def _next(self, refused_by: Collection[Service]) -> _Load:
        return min(
            (load for load in self._loads if load.service not in refused_by),
            key=lambda load: load.preference,
        )

    def _counting(self, placed: _Placed, request_id: str, listener: Listener) -> Listener:
        def listen(delta: Delta) -> None:
            with self._lock:
                placed.take(delta)
                if not placed.left:
                    del self._placed[request_id]
            listener(delta)

        return listen
