"""Calls that have no answer yet, and when to stop waiting for each."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from math import inf

from piecework.profile import now


class Pending:
    """Futures by number. Whoever settles one takes it out first, so that it is settled once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[Future[bytes], float]] = {}
        self._last = -1
        self._refusal: Exception | None = None

    def add(self, seconds: float | None) -> tuple[int, Future[bytes], float]:
        """Open a call: its number, its future, and its deadline on the project's clock.

        Raises the error of `refuse` once that was called.
        """
        deadline = inf if seconds is None else now() + seconds
        future: Future[bytes] = Future()
        with self._lock:
            if self._refusal is not None:
                raise self._refusal
            self._last += 1
            self._waiting[self._last] = future, deadline
            return self._last, future, deadline

    def resolve(self, number: int, answer: bytes) -> None:
        """Answer a call; one that nobody waits for any more is nothing to do."""
        if (future := self._take(number)) is not None and future.set_running_or_notify_cancel():
            future.set_result(answer)

    def reject(self, number: int, error: Exception) -> None:
        """Fail a call."""
        if (future := self._take(number)) is not None and future.set_running_or_notify_cancel():
            future.set_exception(error)

    def withdraw(self, number: int) -> None:
        """Forget a call that was never sent."""
        self._take(number)

    def postpone(self, seconds: float) -> None:
        """Let every open call have this much more time."""
        with self._lock:
            self._waiting = {n: (future, until + seconds) for n, (future, until) in self._waiting.items()}

    def refuse(self, error: Exception) -> None:
        """Take no calls any more; the first error stays."""
        with self._lock:
            self._refusal = self._refusal or error

    def fail_all(self, error: Exception) -> None:
        """Refuse new calls, and fail those that are open."""
        self.refuse(error)
        for number in list(self._waiting):
            self.reject(number, error)

    def next_deadline(self) -> float:
        """The earliest deadline, or infinity."""
        with self._lock:
            return min((deadline for _, deadline in self._waiting.values()), default=inf)

    def _take(self, number: int) -> Future[bytes] | None:
        with self._lock:
            return self._waiting.pop(number, (None, inf))[0]
