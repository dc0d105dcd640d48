"""Keeps one child alive: starts it, and again, after a while, when it has died."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from itertools import count

from piecework.errors import WorkerLostError
from piecework.workers.process.process import ChildProcess, Plan
from piecework.workers.process.reap import close_all

log = logging.getLogger("piecework.workers")

_FIRST_DELAY, _LONGEST_DELAY = 0.5, 30.0
_MOST_FAILURES = 5


def delays() -> Iterator[float]:
    """Yield the seconds to wait before each restart since anything worked."""
    return (min(_LONGEST_DELAY, _FIRST_DELAY * 2**n) for n in count())


class Supervisor:
    """Starts a child and replaces it. After five deaths with nothing done in between it gives up.

    Attributes:
        losses: why children died, oldest first.
        restarts: children that came in place of another and got ready.
        failure: why it gave up, None while it has not.
    """

    def __init__(
        self,
        plan: Callable[[], Plan],
        on_ready: Callable[[bytes], None] = lambda info: None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Start nothing yet.

        Args:
            plan: what to start next.
            on_ready: takes the host's info; where it raises, the start has failed.
            on_change: is told, from some thread, whenever a child died, is ready, or never will be.
        """
        self.losses: list[WorkerLostError] = []
        self.restarts = 0
        self.failure: str | None = None
        self._plan = plan
        self._on_ready = on_ready
        self._on_change = on_change
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._child: ChildProcess | None = None
        self._children: list[ChildProcess] = []  # that have not ended, for all we know
        self._generation = -1
        self._delays = delays()
        self._failures = 0

    def start(self) -> None:
        """Start the first child and wait until it is ready; raises what the start failed with."""
        self._launch()

    @property
    def child(self) -> ChildProcess | None:
        """The child that takes calls; None while there is none."""
        child = self._child
        return child if child is not None and child.lost is None else None

    @property
    def generation(self) -> int:
        """The number of the latest start, from 0."""
        return self._generation

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed.is_set()

    def worked(self) -> None:
        """Say that the child did what it is for: the next death is the first one again."""
        if self._failures:
            self._failures = 0
            self._delays = delays()

    def close(self, seconds: float) -> None:
        """End the child and start no other; may be called again, which tries again what didn't end."""
        with self._lock:
            self._closed.set()
            children = list(self._children)
        alive = close_all(children, seconds)
        with self._lock:
            self._child = None
            self._children = alive

    def _launch(self) -> None:
        plan = self._plan()
        with self._lock:
            if self._closed.is_set():
                raise WorkerLostError(plan.name, f"{plan.name} is closed", point="start")
            self._generation += 1
            child = ChildProcess(plan, self._generation, self._ended)
            self._children = [*(c for c in self._children if not c.ended.is_set()), child]
        try:
            self._on_ready(child.ready.result())
        except BaseException:
            child.shut_down()
            raise
        with self._lock:
            if child.lost is not None:
                raise child.lost
            self._child = child

    def _ended(self, child: ChildProcess) -> None:
        with self._lock:
            if child is not self._child or child.lost is None:
                return
            self._child = None
            if self._closed.is_set():
                return
            self.losses.append(child.lost)
        log.error("%s", child.lost)
        name = f"piecework-restart-{child.name}"
        threading.Thread(target=self._restart, name=name, daemon=True).start()
        self._on_change()

    def _restart(self) -> None:
        while True:
            self._failures += 1
            if self._failures > _MOST_FAILURES:
                self.failure = f"{_MOST_FAILURES} restarts in a row failed; at first {self.losses[-1]}"
                break
            if self._closed.wait(next(self._delays)):
                return
            try:
                self._launch()
            except Exception as error:
                log.error("restart %d of %d failed: %s", self._failures, _MOST_FAILURES, error)
                continue
            self.restarts += 1
            log.warning("the worker is back, as generation %d", self._generation)
            break
        self._on_change()
