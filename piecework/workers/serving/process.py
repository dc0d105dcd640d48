"""A worker in a child process: only ids, positions and page tables go in, tokens come out."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import Any

from piecework.config import EngineConfig
from piecework.errors import ConfigError, DeviceError, WorkerLostError
from piecework.profile import Profile
from piecework.runner.batch import BatchItem, ItemResult
from piecework.runner.load import load_front
from piecework.workers.process.messages import decode, encode, need_msgspec
from piecework.workers.process.process import Plan
from piecework.workers.process.supervisor import Supervisor
from piecework.workers.serving.steps import StepResult, StepWriter
from piecework.workers.serving.worker import Context, Shape

log = logging.getLogger("piecework.workers")

TARGET = "piecework.workers.serving.host:ServingHost"
_LOOK = 2.0  # seconds that a look at the counters may wait for the step that runs


class ProcessServing:
    """See ServingWorker. It is its own runner: `execute` sends the step and waits for its tokens.

    A step belongs to a generation. After a death `execute` refuses until `take_loss` was called, since
    pages of the scheduler stand for nothing any more.
    """

    def __init__(
        self,
        config: EngineConfig,
        profile: Profile,
        on_change: Callable[[], None] = lambda: None,
        target: str = TARGET,
    ) -> None:
        """Load the front here and the rest there; raises what `load` raises, wherever it happened."""
        need_msgspec()
        self.profile = profile
        self._config = config
        self._target = target
        self._name = config.device.device
        self._told = 0  # losses that were taken
        self._shape: Shape | None = None
        self._counters: dict[str, dict[str, int]] = {}
        self._writer = self._new_writer()
        self.front = load_front(config, profile)
        self._supervisor = Supervisor(self._plan, self._take_info, on_change)
        try:
            self._supervisor.start()
        except BaseException:
            self._supervisor.close(seconds=2.0)
            raise

    @property
    def runner(self) -> ProcessServing:
        """See ServingWorker."""
        return self

    @property
    def shape(self) -> Shape:
        """See ServingWorker."""
        assert self._shape is not None, "it is there since the first start"
        return self._shape

    @property
    def cache(self) -> Shape:
        """The size of the KV cache; its tensors are elsewhere."""
        return self.shape

    @property
    def ready(self) -> bool:
        """See ServingWorker."""
        return self._supervisor.child is not None

    @property
    def lost(self) -> bool:
        """See ServingWorker."""
        return len(self._supervisor.losses) > self._told

    def execute(self, items: Sequence[BatchItem]) -> list[ItemResult]:
        """Run one step in the child.

        Raises:
            WorkerLostError: the child died, or is not there; its KV cache is gone.
        """
        child = self._supervisor.child
        if child is None or self.lost:
            raise self._lost()
        try:
            body = encode(self._writer.write(items, self.profile.enabled))
            answer = child.call("step", body, timeout=self._config.worker.worker_step_timeout).result()
            result = decode(StepResult, answer)
        except BaseException:
            self._writer = self._new_writer()  # whatever the other end has understood
            raise
        self._supervisor.worked()
        for name, seconds in result.times.items():
            self.profile.add_time(name, seconds)
        return result.results

    def take_loss(self) -> str | None:
        """See ServingWorker."""
        if not self.lost:
            return None
        losses = self._supervisor.losses
        self._told = len(losses)
        self._writer = self._new_writer()
        return str(losses[-1])

    def failure(self) -> str | None:
        """See ServingWorker."""
        return self._supervisor.failure

    def counters(self) -> dict[str, dict[str, int]]:
        """See ServingWorker."""
        child = self._supervisor.child
        if child is not None:
            try:
                answer = child.call("counters").result(_LOOK)
                self._counters = decode(dict, answer)
            except (DeviceError, TimeoutError, CancelledError) as error:
                log.debug("the counters are the last known: %s", error)
        return self._counters

    def contexts(self) -> list[Context]:
        """See ServingWorker."""
        supervisor, child = self._supervisor, self._supervisor.child
        status = "ready" if child else "failed" if supervisor.failure else "restarting"
        return [
            Context(
                name=self._name,
                kind="process",
                device=self.shape.device,
                pid=child and child.pid,
                generation=supervisor.generation,
                restarts=supervisor.restarts,
                status="closed" if supervisor.closed else status,
                lost=str(supervisor.losses[-1]) if supervisor.losses else None,
            )
        ]

    def leave_thread(self) -> None:
        """See ServingWorker. No thread here has any work."""

    def close(self, seconds: float) -> None:
        """See ServingWorker."""
        self._supervisor.close(seconds)

    def _lost(self) -> WorkerLostError:
        losses = self._supervisor.losses
        return losses[-1] if losses else WorkerLostError(self._name, f"{self._name} is closed")

    def _new_writer(self) -> StepWriter:
        return StepWriter(capacity=4 * self._config.scheduler.max_num_seqs)

    def _plan(self) -> Plan:
        settings = settings_of(self._config)
        if self._shape is not None:  # the scheduler's pages must all be there again
            settings |= {"num_pages": self._shape.num_pages, "kv_cache_memory": None}
        timeout = self._config.worker.worker_start_timeout
        return Plan(self._name, self._target, encode(settings), timeout)

    def _take_info(self, info: bytes) -> None:
        found: dict[str, Any] = decode(dict, info)
        shape = Shape(**{**found["shape"], "compilers": tuple(found["shape"]["compilers"])})
        if self._shape is not None and shape != self._shape:
            raise ConfigError("worker", shape, f"what it was before its restart: {self._shape}")
        self._shape, self._counters = shape, found["counters"]
        for name, seconds in found["times"].items():
            self.profile.add_time(name, seconds)


def settings_of(config: Any) -> dict[str, Any]:
    """Return a configuration's leaves by name as plain values, of which `from_flat` makes it again."""
    found: dict[str, Any] = {}
    for one in dataclasses.fields(config):
        value = getattr(config, one.name)
        if not dataclasses.is_dataclass(value):
            found[one.name] = value
        elif getattr(value, "is_leaf", False):
            found[one.name] = dataclasses.asdict(value)  # type: ignore[arg-type]
        else:
            found.update(settings_of(value))
    return found
