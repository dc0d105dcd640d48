"""What other threads ask of the engine's thread, until that takes it, and when they may ask no more."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import TypeVar

from piecework.engine.orders import Order
from piecework.engine.outputs import EngineStats
from piecework.engine.request import Request
from piecework.errors import EngineDeadError, QueueFullError, RequestError

T = TypeVar("T")


class Intake:
    """Requests, aborts and orders on their way to the engine's thread.

    Attributes:
        arrivals: requests that are yet to be taken.
        stats: the engine's, as of its last step.
        closing: the engine is to stop. dead: why it has.
    """

    def __init__(self, max_queue: int) -> None:
        self.arrivals: list[Request] = []
        self.stats = EngineStats()
        self.closing = False
        self.dead: str | None = None
        self._max_queue = max_queue
        self._changed = threading.Condition()
        self._aborts: set[str] = set()  # of open requests only
        self._orders: list[Order] = []
        self._open: set[str] = set()
        self._draining = False

    def wake(self) -> None:
        """Let those look again who wait for something outside of this."""
        with self._changed:
            self._changed.notify_all()

    def put(self, request_id: str, samples: Sequence[Request]) -> None:
        """Queue the samples of a request, all or none.

        Raises:
            RequestError: the id is in use, or more samples than may ever wait.
            QueueFullError: too many requests wait.
            EngineDeadError: the engine has stopped, or is stopping.
        """
        with self._changed:
            if self._stopping():
                raise EngineDeadError(self.dead or "it is shutting down")
            if len(samples) > self._room():
                self._refuse_if_never(len(samples))
                raise QueueFullError(self._max_queue)
            if request_id in self._open:
                raise RequestError(
                    f"request_id={request_id!r} is in use by a running request", param="request_id"
                )
            self._open.add(request_id)
            self.arrivals.extend(samples)
            self._changed.notify_all()

    def at_once(self) -> AbstractContextManager[object]:
        """What is put in a `with` of it is taken together: no step begins before the block ends."""
        return self._changed

    def wait_for_room(self, samples: int) -> None:
        """Return once the queue takes so many samples, or nothing any more; the next `put` tells which."""
        with self._changed:
            self._changed.wait_for(lambda: self._room() >= samples or self._stopping())

    def abort(self, request_id: str) -> None:
        """Ask for the end of a request; an unknown or ended id is nothing to do."""
        with self._changed:
            if request_id in self._open:
                self._aborts.add(request_id)
                self._changed.notify_all()

    def order(self, what: Callable[[], T]) -> T:
        """Return what `what` does on the engine's thread, between two steps."""
        done: Future[T] = Future()
        with self._changed:
            if self.dead is not None or self.closing:
                raise EngineDeadError(self.dead or "it is shutting down")
            self._orders.append((what, done))
            self._changed.notify_all()
        return done.result()

    def drain(self, timeout: float) -> bool:
        """Take no new requests and wait for the open ones; False where `timeout` s were not enough."""
        with self._changed:
            self._draining = True
            return self._changed.wait_for(lambda: not self._open or self.dead is not None, timeout)

    def close(self) -> None:
        """Ask the engine's thread to stop, and take nothing any more."""
        with self._changed:
            self.closing = True
            self._changed.notify_all()

    def die(self, cause: str) -> None:
        """Take nothing any more: the engine has stopped."""
        with self._changed:
            self.dead = cause

    def wait(self, has_work: Callable[[], bool], seconds: float | None) -> None:
        """Engine's thread: sleep until there is something to do here or for the engine, or time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_something() or has_work(), seconds)

    def take(
        self, add: Callable[[Request], None], stats: Callable[[], EngineStats]
    ) -> tuple[set[str], list[Order]]:
        """Engine's thread: `add` what arrived, and return the ids to abort and what was ordered."""
        with self._changed:
            arrivals, aborts, orders = list(self.arrivals), set(self._aborts), list(self._orders)
            self.arrivals.clear()
            self._aborts.clear()
            self._orders.clear()
            for request in arrivals:
                add(request)
            self.stats = stats()
        return aborts, orders

    def publish(self, stats: EngineStats) -> None:
        """Engine's thread: show how it is after a step."""
        with self._changed:
            self.stats = stats
            self._changed.notify_all()

    def ended(self, request_id: str, stats: EngineStats, *, still_open: bool) -> None:
        """Engine's thread: a sample ended; the id is free where no other one is open."""
        with self._changed:
            self.stats = stats
            if not still_open:
                self._open.discard(request_id)
                self._aborts.discard(request_id)  # or it would end the next one of that name
                self._changed.notify_all()

    def _room(self) -> int:
        return self._max_queue - len(self.arrivals) - self.stats.waiting

    def _refuse_if_never(self, samples: int) -> None:
        """An empty queue would not take them either: coming back later does not help."""
        if samples > self._max_queue:
            message = f"n={samples} is not allowed: at most {self._max_queue} samples may wait (max_queue)"
            raise RequestError(message, param="n", code="too_many_samples")

    def _stopping(self) -> bool:
        return self.dead is not None or self.closing or self._draining

    def _has_something(self) -> bool:
        return bool(self.closing or self.arrivals or self._aborts or self._orders)
