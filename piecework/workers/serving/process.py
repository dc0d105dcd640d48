"""A worker in a child process: only ids, positions and page tables go in, tokens come out."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, NamedTuple

import torch
from torch import Tensor

from piecework.config import EngineConfig
from piecework.errors import ConfigError, DeviceError, WorkerLostError
from piecework.profile import Profile, now
from piecework.runner.batch import BatchItem, ItemResult
from piecework.runner.load import Loaded, load_front
from piecework.runner.ranks import collectives_of
from piecework.workers.process.messages import decode, encode, need_msgspec
from piecework.workers.process.process import ChildProcess, Plan
from piecework.workers.process.supervisor import Supervisor
from piecework.workers.serving.ahead import Results
from piecework.workers.serving.deadlines import Deadlines
from piecework.workers.serving.runner import Context, Shape
from piecework.workers.serving.steps import ServingInfo, ServingOptions, StepResult, StepWriter

log = logging.getLogger("piecework.workers")

TARGET = "piecework.workers.serving.host:ServingHost"
_LOOK = 0.5  # seconds that a look at the counters may wait for the step that runs
_CLOSE_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class RemoteDevice:
    """A device that another process has."""

    name: str

    def release_threads(self) -> None:
        """No thread here waits for its work."""


@dataclasses.dataclass(frozen=True)
class RemoteCache:
    """The size of a KV cache that another process has. It stays as large as it is."""

    device: RemoteDevice
    num_pages: int
    page_size: int
    nbytes: int
    dtype: str
    resizable = False
    fixed_because = "a KV cache in a process of its own keeps its size"


class _Sent(NamedTuple):
    """A step that the child has, and when it was sent."""

    child: ChildProcess
    future: Future[bytes]
    rows: int
    at: float


class ProcessRunner:
    """Runs steps in a child: `execute` sends the step and waits for its tokens.

    A step belongs to a generation. After a death `execute` refuses until `take_loss` was called, since
    pages of the scheduler stand for nothing any more.
    """

    def __init__(
        self,
        config: EngineConfig,
        profile: Profile,
        name: str,
        settled: tuple[str, str] | None = None,
        on_change: Callable[[], None] = lambda: None,
        target: str = TARGET,
        worker: str | None = None,
    ) -> None:
        """Start nothing yet; see `load_in_process`.

        Args:
            name: the device, one of `config.device`.
            settled: precision and quantisation of the device before it.
            on_change: is told, from some thread, when the child died, is back, or never will be.
            target: makes the host.
            worker: what the process is called, by default as its device.
        """
        need_msgspec()
        self.profile = profile
        self.device = RemoteDevice(name)
        self.name = worker or name
        self._config = config
        self._settled = settled
        self._target = target
        self._told = 0  # losses that were taken
        self._shape: Shape | None = None
        self._counters: dict[str, dict[str, int]] = {}
        self._ranks: tuple[int, ...] = ()
        self._writer = self._new_writer()
        self._deadlines = self._new_deadlines()
        self._last_limit = 0.0  # seconds that the step before had
        self._answered = 0.0  # when it was answered
        self._supervisor = Supervisor(self._plan, self._take_info, on_change)

    def start(self) -> None:
        """Load the model in the child; raises what `load` raises, and WorkerLostError where it died."""
        try:
            self._supervisor.start()
        except BaseException:
            self.close()
            raise

    @property
    def shape(self) -> Shape:
        """What was loaded."""
        assert self._shape is not None, "it is there since the first start"
        return self._shape

    @property
    def dtype(self) -> str:
        """The precision that the model runs in."""
        return self.shape.dtype

    @property
    def compilers(self) -> tuple[str, ...]:
        """Names of the compilers that made the body's pieces."""
        return self.shape.compilers

    @property
    def cache(self) -> RemoteCache:
        """The size of the KV cache; its tensors are elsewhere."""
        shape = self.shape
        return RemoteCache(self.device, shape.num_pages, shape.page_size, shape.kv_bytes, shape.kv_dtype)

    @property
    def ready(self) -> bool:
        """False while there is no child that could run a step."""
        return self._supervisor.child is not None

    @property
    def lost(self) -> bool:
        """True while `take_loss` has something to say."""
        return len(self._supervisor.losses) > self._told

    def execute(self, items: Sequence[BatchItem]) -> list[ItemResult]:
        """Run one step in the child.

        Raises:
            WorkerLostError: the child died, or is not there; its KV cache is gone.
        """
        return self.begin(items)()

    @property
    def runs_ahead(self) -> bool:
        """False where several ranks run each step: only the first one has the tokens that it draws."""
        return self._config.worker.tensor_parallel_size == 1

    def begin(self, items: Sequence[BatchItem], *, ahead: bool = False) -> Results:
        """Send one step to the child; see `AheadRunner` and `execute`."""
        sent = self._send(items, ahead=ahead)
        return lambda: self._answer(sent).results

    def examine(self, items: Sequence[BatchItem]) -> tuple[list[ItemResult], Tensor | None]:
        """Run one step in the child, and fetch the logits [R, V] of the items that draw; see `execute`."""
        result = self._answer(self._send(items, examined=True))
        drawing = sum(item.sampling is not None for item in items)
        if not drawing:
            return result.results, None
        rows = torch.frombuffer(bytearray(result.logits), dtype=torch.float32)
        return result.results, rows.view(drawing, -1)

    def _send(self, items: Sequence[BatchItem], *, examined: bool = False, ahead: bool = False) -> _Sent:
        child = self._supervisor.child
        if child is None or self.lost:
            raise self._lost()
        rows = sum(len(item.token_ids) for item in items)
        limit = self._deadlines.seconds(rows)
        try:
            step = self._writer.write(items, self.profile.enabled)
            body = encode(step._replace(examined=examined, ahead=ahead))
            # The step before may have all of its time left.
            future = child.call("step", body, timeout=limit + (self._last_limit if ahead else 0.0))
        except BaseException:
            self._writer = self._new_writer()  # whatever the other end has understood
            raise
        self._last_limit = limit
        return _Sent(child, future, rows, now())

    def _answer(self, sent: _Sent) -> StepResult:
        try:
            result = decode(StepResult, sent.child.answer(sent.future))
        except BaseException:
            self._writer = self._new_writer()
            raise
        begin, self._answered = max(sent.at, self._answered), now()
        self._deadlines.took(sent.rows, self._answered - begin)
        self._supervisor.worked()
        for name, seconds in result.times.items():
            self.profile.add_time(name, seconds)
        return result

    def take_loss(self) -> str | None:
        """Say, once, why everything in the KV cache is gone; None where nothing happened."""
        if not self.lost:
            return None
        losses = self._supervisor.losses
        self._told = len(losses)
        self._writer = self._new_writer()
        return str(losses[-1])

    def failure(self) -> str | None:
        """Say why no step will ever run again; None while one may."""
        return self._supervisor.failure

    def counters(self) -> dict[str, dict[str, int]]:
        """What the programs counted; the last known where the child can't be asked, or is busy for long."""
        child = self._supervisor.child
        if child is not None:
            try:
                answer = child.call("counters").result(_LOOK)
                self._counters = decode(dict, answer)
            except (DeviceError, TimeoutError, CancelledError) as error:
                log.debug("the counters are the last known: %s", error)
        return self._counters

    def context(self) -> Context:
        """The worker as it is now."""
        supervisor, child = self._supervisor, self._supervisor.child
        status = "ready" if child else "failed" if supervisor.failure else "restarting"
        return Context(
            name=self.name,
            kind="process",
            device=self.device.name,
            pid=child.pid if child else None,
            generation=supervisor.generation,
            restarts=supervisor.restarts,
            status="closed" if supervisor.closed else status,
            lost=str(supervisor.losses[-1]) if supervisor.losses else None,
            ranks=self._ranks if child else (),
        )

    def close(self, seconds: float = _CLOSE_SECONDS) -> None:
        """End the child within `seconds`, whatever it does. Running calls fail; may be called twice."""
        self._supervisor.close(seconds)

    def _lost(self) -> WorkerLostError:
        losses = self._supervisor.losses
        return losses[-1] if losses else WorkerLostError(self.name, f"{self.name} is closed")

    def _new_writer(self) -> StepWriter:
        return StepWriter(capacity=4 * self._config.scheduler.max_num_seqs)

    def _new_deadlines(self) -> Deadlines:
        return Deadlines(self._config.worker.step_timeout, self._config.worker.start_timeout)

    def _plan(self) -> Plan:
        settings, settled = settings_of(self._config), self._settled
        if self._shape is not None:  # the scheduler's pages must all be there again
            settings |= {"num_pages": self._shape.num_pages, "kv_cache_memory": None}
            settled = self._shape.settled
        options = encode(ServingOptions(settings, self.device.name, settled))
        worker = self._config.worker
        return Plan(self.name, self._target, options, worker.start_timeout + worker.compile_timeout)

    def _take_info(self, info: bytes) -> None:
        found = decode(ServingInfo, info)
        if self._shape is not None and found.shape != self._shape:
            raise ConfigError("worker", found.shape, f"what it was before its restart: {self._shape}")
        self._shape, self._counters, self._ranks = found.shape, found.counters, found.ranks
        self._deadlines = self._new_deadlines()  # the first step of a process may have to set up, each time
        for name, seconds in found.times.items():
            self.profile.add_time(name, seconds)


def load_in_process(
    config: EngineConfig,
    profile: Profile,
    name: str,
    settled: tuple[str, str] | None = None,
    *,
    on_change: Callable[[], None] = lambda: None,
    on_start: Callable[[ProcessRunner], None] = lambda runner: None,
    target: str = TARGET,
    worker: str | None = None,
) -> Loaded:
    """Load as `load_on` does, with the runner in a child process and the tokenizer here.

    `on_start` gets the runner before the child is started, so that it can be closed meanwhile. `worker` is
    the name of the process.
    """
    if config.worker.tensor_parallel_size > 1:
        collectives_of(name)  # refuses a device that has none
    front = load_front(config, profile)
    runner = ProcessRunner(config, profile, name, settled, on_change, target, worker)
    on_start(runner)
    runner.start()
    shape = runner.shape
    return Loaded(
        runner=runner,  # type: ignore[arg-type]  # it has what the engine needs of one
        model_config=front.model_config,
        tokenizer=front.tokenizer,
        default_params=front.default_params,
        eos_ids=front.eos_ids,
        max_model_len=shape.max_model_len,
        weight_bytes=shape.weight_bytes,
        dtype=shape.settled[0],
        quantization=shape.settled[1],
        quantized=shape.quantized,
        repacked=shape.repacked,
    )


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
