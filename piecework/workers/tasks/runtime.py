"""The worker of a process: it lives across programs, until a switch, a fault, or the close."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

from piecework.workers.tasks.worker import Worker


class Runtime:
    """Holds at most one worker. `key` says what a worker is for: device, platform, functions."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._key: Hashable = None
        self._worker: Worker | None = None

    def worker(self, key: Hashable, make: Callable[[], Worker]) -> Worker:
        """Return the worker for `key`: the one that is there, or a new one after the old one's close.

        A worker is not used again where one of those below it is gone.
        """
        with self._lock:
            if self._worker is not None and (key != self._key or not self._worker.healthy):
                self._discard()
            if self._worker is None:
                self._worker, self._key = make().start(), key
            return self._worker

    def close(self, deadline: float = 5.0) -> None:
        """Close the worker, if there is one; a second call does nothing."""
        with self._lock:
            self._discard(deadline)

    def _discard(self, deadline: float = 5.0) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close(deadline)
