"""Steps in flight: sent to the runner, with results that were not taken yet.

The plain loop has one: it is scheduled, run and taken before the next one is scheduled. The overlapped loop
(`async_scheduling`) has two: while a step runs, the next one is scheduled and sent, and listeners are told of
the one before. A token that is not known yet is filled in where steps run. An end or a failure that comes out
then makes what the step behind gives void, for a request or as a whole.

Pages that are given up may be given out again while a step that writes to them is in flight: steps run in the
order in which they were sent, and of pages that are its own each reads only what it, or one before, wrote.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from piecework.engine.audited import AuditedRunner
from piecework.engine.request import Request
from piecework.engine.scheduler import Scheduled
from piecework.profile import now
from piecework.runner.batch import BatchItem, ItemResult
from piecework.workers.serving.ahead import AheadRunner, Results, StepThread
from piecework.workers.serving.process import ProcessRunner
from piecework.workers.serving.runner import StepRunner

log = logging.getLogger("piecework.engine")
Admit = Callable[[Sequence[BatchItem]], None]
"""admit(items) raises where a step must not run."""


@dataclass(frozen=True)
class Flight:
    """A step, when it was sent, and what waits for its results, or raises what it failed with.

    `overlapped`: it was sent while another one was in flight.
    """

    step: Sequence[Scheduled]
    sent_at: float
    results: Results
    overlapped: bool

    def void(self) -> list[Request]:
        """Take nothing of it: its requests are where they were before. Returns those that it was to serve."""
        served = [part.request for part in self.step if part.awaited]
        for request in served:
            request.in_flight.clear()
        return served


class Flights:
    """The steps in flight, in order."""

    def __init__(self, runner: StepRunner, admit: Admit, *, overlap: bool) -> None:
        """`overlap`: have two in flight, where the runner can."""
        self._admit = admit
        self._overlap = overlap
        self._flights: deque[Flight] = deque()
        self._ended_at = 0.0  # when the last one landed
        self._refused = False  # whether the last one could not be sent
        self._thread: StepThread | None = None
        self._ahead: AheadRunner | None = None
        self.use(runner)

    def use(self, runner: StepRunner) -> None:
        """Send steps to `runner` from now on; none is in flight."""
        self.close()
        self._runner, self._ahead = runner, None
        if not self._overlap:
            return
        if isinstance(runner, ProcessRunner) and runner.runs_ahead:
            self._ahead = runner
        elif isinstance(runner, ProcessRunner | AuditedRunner):
            audited = isinstance(runner, AuditedRunner)
            why = "steps are audited" if audited else "several ranks share each step"
            log.warning("async_scheduling has no effect on %s: %s", runner.device.name, why)
        else:
            runner.device.release_threads()  # of the thread that loaded it
            self._ahead = self._thread = StepThread(runner)

    def __bool__(self) -> bool:
        """True while a step is in flight."""
        return bool(self._flights)

    @property
    def full(self) -> bool:
        """True where the oldest one must land before another is sent."""
        return self._refused or len(self._flights) > (self._ahead is not None)

    def items(self, step: Sequence[Scheduled]) -> list[BatchItem]:
        """The runner's view of a step that is to be sent next."""
        if not self._flights:
            return [part.item() for part in step]
        before = {part.request: place for place, part in enumerate(self._flights[-1].step)}
        return [part.item(before.get(part.request)) for part in step]

    def send(self, step: Sequence[Scheduled], items: Sequence[BatchItem]) -> None:
        """Send a step; what goes wrong is raised by its results."""
        ahead = bool(self._flights)
        try:
            self._admit(items)
            if self._ahead is not None:
                results = self._ahead.begin(items, ahead=ahead)
            else:
                results = partial(self._runner.execute, items)
        except Exception as error:
            results, self._refused = partial(_fail, error), True
        for part in step:
            part.request.in_flight.append(part)
        self._flights.append(Flight(step, now(), results, ahead))

    @property
    def oldest(self) -> Flight:
        """The one whose results come next."""
        return self._flights[0]

    @property
    def running_since(self) -> float:
        """When the oldest one was the only one to wait for."""
        return max(self.oldest.sent_at, self._ended_at)

    def wait(self) -> tuple[Sequence[Scheduled], list[ItemResult]]:
        """Wait for the oldest one; return its parts and results, or raise what it failed with."""
        return self.oldest.step, self.oldest.results()

    def landed(self) -> None:
        """The oldest one has ended."""
        self._flights.popleft()
        self._ended_at = now()
        self._refused = self._refused and bool(self._flights)

    def failed(self) -> list[Request]:
        """The oldest one has failed, and so all others are void. Returns the requests that it served."""
        served = self.oldest.void()
        self.landed()
        self.void()
        return served

    def void(self) -> None:
        """Take nothing of any, and wait for their ends."""
        while self._flights:
            self.oldest.void()
            with contextlib.suppress(Exception):  # each fails where the one before it did
                self.oldest.results()
            self.landed()

    def close(self) -> None:
        """Void all, and end the thread that runs them, where there is one."""
        self.void()
        if self._thread is not None:
            self._thread.close()
            self._thread = None


def _fail(error: Exception) -> NoReturn:
    raise error
