"""Steps that are sent while another one runs: what they need of its tokens is filled in where they run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import numpy as np

from piecework.errors import PieceworkError
from piecework.runner.batch import BatchItem, ItemResult
from piecework.runner.penalties import as_ids
from piecework.workers.serving.runner import StepRunner

Results = Callable[[], list[ItemResult]]
"""Waits for a step's end, and returns or raises what `StepRunner.execute` does."""


class AheadRunner(Protocol):
    """Takes a step before the one before it has ended, and runs them in that order."""

    def begin(self, items: Sequence[BatchItem], *, ahead: bool) -> Results:
        """Send a step and wait for nothing.

        `ahead`: the step before may still run; where it fails, this one is not run and fails, too.
        """
        ...


class Chain:
    """Gives each step the tokens that the one before it drew. Belongs to whoever runs them, one at a time."""

    def __init__(self) -> None:
        self._before: Sequence[ItemResult] | None = None

    def fill(self, items: Sequence[BatchItem], *, ahead: bool) -> Sequence[BatchItem]:
        """Return the items with all of their tokens.

        Raises:
            PieceworkError: the step before one that was sent `ahead` has failed.
        """
        before, self._before = self._before, None
        if not ahead:
            return items
        if before is None:
            raise PieceworkError("the step before this one failed")
        return [item if item.follows is None else _filled(item, before[item.follows]) for item in items]

    def ran(self, results: Sequence[ItemResult]) -> None:
        """Note what a step gave; one of which nothing is noted has failed."""
        self._before = results


class StepThread:
    """Runs the steps of a runner of this process in a thread of their own, beside the one that asks."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self._chain = Chain()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="piecework-steps", daemon=True)
        self._thread.start()

    def begin(self, items: Sequence[BatchItem], *, ahead: bool) -> Results:
        """See AheadRunner."""
        job = _Job(items, ahead, Future())
        self._jobs.put(job)
        return job.done.result

    def close(self) -> None:
        """End the thread, when what was sent has run."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                results = self._runner.execute(self._chain.fill(job.items, ahead=job.ahead))
                self._chain.ran(results)
                job.done.set_result(results)
            except BaseException as error:  # it is the engine's, which waits for it
                job.done.set_exception(error)
            del job  # nothing is kept until the next one comes
        self._runner.device.release_threads()


class _Job(NamedTuple):
    items: Sequence[BatchItem]
    ahead: bool
    done: Future[list[ItemResult]]


def _filled(item: BatchItem, before: ItemResult) -> BatchItem:
    """One that decodes, with the token that was drawn, or any where that failed and nobody goes on."""
    token, state = before.token_id or 0, item.sampling
    if state is not None and state.params.counts_output:
        known = as_ids(state.output_ids[: state.index - 1])  # the caller may have got the token by now
        state = replace(state, output_ids=np.append(known, token))  # type: ignore[arg-type]
    return BatchItem((token,), item.span, item.pages, state)
