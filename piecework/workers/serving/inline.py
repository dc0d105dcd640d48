"""A worker that is no process: the runner lives in this one, and a call of it is a call."""

from __future__ import annotations

import os

from piecework.config import EngineConfig
from piecework.profile import Profile
from piecework.runner.load import Front, load
from piecework.runner.runner import Runner
from piecework.workers.serving.worker import Context, Shape, counters_of


class InlineServing:
    """See ServingWorker. It is ready as soon as it is made, and lost only with the process."""

    def __init__(self, config: EngineConfig, profile: Profile) -> None:
        loaded = load(config, profile)
        self.front = Front(loaded.model_config, loaded.tokenizer, loaded.default_params, loaded.eos_ids)
        self.shape = Shape.of(loaded)
        self.runner: Runner = loaded.runner
        self.ready = True
        self.lost = False
        self._closed = False

    def take_loss(self) -> str | None:
        """See ServingWorker."""
        return None

    def failure(self) -> str | None:
        """See ServingWorker."""
        return None

    def counters(self) -> dict[str, dict[str, int]]:
        """See ServingWorker."""
        return dict(counters_of(self.runner.programs))

    def contexts(self) -> list[Context]:
        """See ServingWorker."""
        device = self.shape.device
        return [Context(device, "inline", device, os.getpid(), 0, 0, "closed" if self._closed else "ready")]

    def leave_thread(self) -> None:
        """See ServingWorker."""
        self.runner.device.release_threads()

    def close(self, seconds: float) -> None:
        """See ServingWorker. A call that hangs can't be ended in one's own process."""
        self._closed = True
