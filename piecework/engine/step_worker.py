"""The worker that runs a service's steps: its process, where it has one, and what became of that."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from piecework.engine.outputs import EngineStats
from piecework.runner.failover import Runners
from piecework.workers.serving.process import ProcessRunner
from piecework.workers.serving.runner import Context, StepRunner

_LOSSES_SHOWN = 8


class StepWorker:
    """Follows the runner in use. `losses` are the latest deaths of its process."""

    def __init__(self, runners: Runners, processes: Sequence[ProcessRunner]) -> None:
        """`processes` are all that were ever started, also those of a device that is given up."""
        self.losses: deque[str] = deque(maxlen=_LOSSES_SHOWN)
        self._runners = runners
        self._processes = processes
        self._remote: ProcessRunner | None = None

    def use(self, runner: StepRunner) -> None:
        """Follow another runner."""
        self._remote = runner if isinstance(runner, ProcessRunner) else None
        if self._remote is not None:
            self._remote.take_loss()  # one that stood by may have died; nothing of a request was there

    @property
    def restarting(self) -> bool:
        """True while its process is not there to run a step."""
        return self._remote is not None and not self._remote.ready

    def needs_the_engine(self, has_work: bool) -> bool:
        """Whether there is a step to run or something that became of the process."""
        remote = self._remote
        if remote is None:
            return has_work
        able = remote.ready or self._runners.can_move
        return remote.lost or self.failure() is not None or (has_work and able)

    def failure(self) -> str | None:
        """Why no step will ever run again: its process was given up, and no other device can go on."""
        return None if self._remote is None or self._runners.can_move else self._remote.failure()

    def can_step(self, has_work: bool, lose_cache: Callable[[str], None]) -> bool:
        """Whether a step can be tried. What a dead process held is lost, unless another device goes on."""
        remote = self._remote
        if remote is None:
            return True
        if (remote.lost or not remote.ready) and self._runners.can_move and has_work:
            return True  # the step fails, and the next device goes on
        if (loss := remote.take_loss()) is not None:
            self.losses.append(loss)
            lose_cache(loss)
        return remote.ready

    def context(self, stats: EngineStats, rings: dict[str, dict[str, list[int]]], closing: bool) -> Context:
        """The worker as it is now; `rings` are those of its steps."""
        if self._remote is not None:
            context = self._remote.context()
            return replace(context, running=stats.running, waiting=stats.waiting, rings=rings)
        name = self._runners.active_device
        return Context(name, "inline", name, os.getpid(), 0, 0, "closed" if closing else "ready", rings=rings)

    def close(self) -> None:
        """End all processes, and so a step that hangs in one."""
        for process in self._processes:
            process.close()
