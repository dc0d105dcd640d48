"""What the engine needs of a worker that runs its steps, wherever that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from piecework.config import EngineConfig
from piecework.devices.registry import device_class
from piecework.profile import Profile
from piecework.runner.batch import BatchItem, ItemResult
from piecework.runner.load import Front, Loaded


@dataclass(frozen=True)
class Shape:
    """What is fixed once the model is loaded; `compilers` are those that made the body's pieces."""

    device: str
    dtype: str
    max_model_len: int
    weight_bytes: int
    num_pages: int
    page_size: int
    kv_bytes: int
    compilers: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the KV cache, as a cache calls them."""
        return self.kv_bytes

    @classmethod
    def of(cls, loaded: Loaded) -> Shape:
        """Read the shape of a runner in this process."""
        runner = loaded.runner
        return cls(
            device=runner.device.name,
            dtype=str(runner.cache.dtype).removeprefix("torch."),
            max_model_len=loaded.max_model_len,
            weight_bytes=loaded.weight_bytes,
            num_pages=runner.cache.num_pages,
            page_size=runner.cache.page_size,
            kv_bytes=runner.cache.nbytes,
            compilers=tuple(dict.fromkeys(piece.compiler for piece in runner.programs.body.pieces)),
        )


@dataclass(frozen=True)
class Context:
    """One worker, as /health and the metrics show it.

    Attributes:
        kind: `inline` or `process`.
        status: `ready`, `restarting`, `failed` or `closed`.
        generation: counts starts from 0; what an older one held is gone.
        lost: why the last generation ended, None where none did.
    """

    name: str
    kind: str
    device: str
    pid: int | None
    generation: int
    restarts: int
    status: str
    lost: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


class Pages(Protocol):
    """What the scheduler must know of a KV cache."""

    @property
    def num_pages(self) -> int:
        """Pages, the dummy one among them."""
        ...

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        ...


class StepRunner(Protocol):
    """What the engine runs steps on."""

    @property
    def profile(self) -> Profile:
        """Where stages are timed."""
        ...

    @property
    def cache(self) -> Pages:
        """The KV cache's size."""
        ...

    def execute(self, items: Sequence[BatchItem]) -> list[ItemResult]:
        """Run one step; the result has an entry per item, in the same order."""
        ...


class ServingWorker(Protocol):
    """A loaded model on a worker. `ready`: steps can run; whoever waits for it is told by `on_change`."""

    @property
    def front(self) -> Front:
        """What the engine must know of the model."""
        ...

    @property
    def shape(self) -> Shape:
        """What the model and its cache take."""
        ...

    @property
    def runner(self) -> StepRunner:
        """What steps run on."""
        ...

    @property
    def ready(self) -> bool:
        """False while there is no process that could run a step."""
        ...

    @property
    def lost(self) -> bool:
        """True while `take_loss` has something to say."""
        ...

    def take_loss(self) -> str | None:
        """Say, once, why everything in the KV cache is gone; None where nothing happened."""
        ...

    def failure(self) -> str | None:
        """Say why no step will ever run again; None while one may."""
        ...

    def counters(self) -> dict[str, dict[str, int]]:
        """What the programs `body` and `head` counted; the last known where that can't be asked now."""
        ...

    def contexts(self) -> list[Context]:
        """The workers, for those who watch."""
        ...

    def leave_thread(self) -> None:
        """The calling thread leaves the work to another one."""
        ...

    def close(self, seconds: float) -> None:
        """End the worker within `seconds`, whatever it does. Running calls fail; may be called twice."""
        ...


def counters_of(programs: Any) -> Mapping[str, dict[str, int]]:
    """Read the counters of a runner's programs."""
    return {"body": programs.counters.snapshot(), "head": programs.head_counters.snapshot()}


def place(config: EngineConfig) -> str:
    """Return where steps run, `inline` or `process`; `auto` is what the kind of device wants.

    Raises ConfigError for an unknown device.
    """
    if config.worker.workers != "auto":
        return config.worker.workers
    name = config.device.device
    return device_class(name.partition(":")[0], name).workers
