"""How an engine comes to the next device's runner: after a failure, or by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable

from piecework.config import EngineConfig
from piecework.engine.audited import AuditedRunner, make_audit
from piecework.engine.beside import run_beside
from piecework.engine.carry import Carried
from piecework.engine.engine import Engine
from piecework.engine.reference import Reference
from piecework.errors import WorkerLostError
from piecework.failsafe.errors import ExhaustedError
from piecework.runner.failover import Runners
from piecework.runner.load import Loaded
from piecework.workers.serving.runner import StepRunner


class Takeover:
    """Lets the next device take over. Engine's thread only. `audit` is None where nothing is audited."""

    def __init__(
        self,
        config: EngineConfig,
        runners: Runners,
        on_use: Callable[[Loaded], None],
        on_gone: Callable[[str], None],
    ) -> None:
        """`on_use` is told what is used from now on, `on_gone` that there is nothing any more, and why."""
        self.audit = make_audit(config)
        self._config = config
        self._runners = runners
        self._on_use = on_use
        self._on_gone = on_gone

    def runner(self, loaded: Loaded) -> StepRunner:
        """What the engine runs steps on: the runner, audited where that was asked for."""
        reference = self._runners.reference
        if self.audit is None or self.audit.ended is not None or reference in (None, loaded):
            return loaded.runner
        assert reference is not None
        self.audit.again()
        return AuditedRunner(loaded.runner, Reference(reference.runner, self._config), self.audit)

    def after(self, error: Exception, engine: Engine) -> tuple[StepRunner, Carried] | None:
        """Load on the next device where it was the device that failed; see `Successor`."""
        if isinstance(error, WorkerLostError) and not self._runners.can_move:
            return None  # its process is started again
        moves = self._runners.moves(error)  # the old cache is read before it is let go
        carried = engine.pack(self._runners.doubt(error)) if moves else Carried()
        engine_thread = threading.current_thread()

        def load() -> Loaded | None:
            found = self._runners.successor(error)
            if found is not None and threading.current_thread() is not engine_thread:
                found.runner.device.release_threads()
            return found

        try:
            loaded = run_beside(load, engine.gaps.seconds_left, engine.end_overdue)
        except ExhaustedError as exhausted:
            if self._runners.gone:
                self._on_gone(str(exhausted))  # before a client hears of it and comes back
            raise
        if loaded is None:
            return None
        self._on_use(loaded)
        return self.runner(loaded), carried

    def by_hand(self, device: str, engine: Engine) -> None:
        """Load on a device that somebody chose, and go on there; the one in use is nothing to do."""
        carried = Carried() if self._runners.in_use(device) else engine.pack(self._runners.doubt())
        if (loaded := self._runners.move_to(device)) is not None:
            self._on_use(loaded)
            engine.take_over(self.runner(loaded), carried)
