"""Where a device's model is loaded: in this process or in one of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from piecework.config import EngineConfig
from piecework.profile import Profile
from piecework.runner.failover import load_on
from piecework.runner.load import Loaded
from piecework.workers.serving.process import ProcessRunner, load_in_process
from piecework.workers.serving.runner import place


@dataclass(frozen=True)
class Loader:
    """Loads as the settings and the device want it.

    Attributes:
        on_change: is told, from some thread, when a worker died, came back, or won't.
        on_start: gets the runner of a process before that is started, so that it can be closed meanwhile.
        worker: the name of the process, by default that of its device.
    """

    on_change: Callable[[], None]
    on_start: Callable[[ProcessRunner], None]
    worker: str | None = None

    def __call__(
        self, config: EngineConfig, profile: Profile, name: str, settled: tuple[str, str] | None
    ) -> Loaded:
        """Load on the device `name`; `settled`: precision and quantisation of the device before it."""
        if place(config, name) == "inline":
            return load_on(config, profile, name, settled)
        return load_in_process(
            config,
            profile,
            name,
            settled,
            on_change=self.on_change,
            on_start=self.on_start,
            target="piecework.engine.worker_host:EngineHost",
            worker=self.worker,
        )
