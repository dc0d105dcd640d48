"""What the engine needs of a runner, and tells of its worker, wherever that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from torch import Tensor

from piecework.config import EngineConfig
from piecework.devices.registry import device_class
from piecework.profile import Profile
from piecework.runner.batch import BatchItem, ItemResult
from piecework.runner.load import Loaded


@dataclass(frozen=True)
class Shape:
    """What is fixed once the model is loaded.

    Attributes:
        settled: the settings `dtype` and `quantization` that make the same of it on another device.
        compilers: those that made the body's pieces.
        quantized, repacked: see `Loaded`.
    """

    device: str
    dtype: str
    kv_dtype: str
    settled: tuple[str, str]
    max_model_len: int
    weight_bytes: int
    num_pages: int
    page_size: int
    kv_bytes: int
    compilers: tuple[str, ...]
    quantized: str
    repacked: bool

    @classmethod
    def of(cls, loaded: Loaded) -> Shape:
        """Read the shape of a runner in this process."""
        runner = loaded.runner
        return cls(
            device=runner.device.name,
            dtype=runner.dtype,
            kv_dtype=str(runner.cache.dtype).removeprefix("torch."),
            settled=(loaded.dtype, loaded.quantization),
            max_model_len=loaded.max_model_len,
            weight_bytes=loaded.weight_bytes,
            num_pages=runner.cache.num_pages,
            page_size=runner.cache.page_size,
            kv_bytes=runner.cache.nbytes,
            compilers=runner.compilers,
            quantized=loaded.quantized,
            repacked=loaded.repacked,
        )


@dataclass(frozen=True)
class Context:
    """One worker, as /health and the metrics show it.

    Attributes:
        kind: `inline` or `process`.
        status: `ready`, `restarting`, `failed` or `closed`.
        generation: counts starts from 0; what an older one held is gone.
        lost: why the last generation ended, None where none did.
        ranks: processes of the other ranks of a tensor-parallel group.
        running, waiting: its requests.
        rings: limit and high-water mark of each resource that a step takes, by ring, see StepGraph.
        pending_tokens: those of prompts and answers that it has yet to compute, at most; None where
            requests are not spread over several workers.
    """

    name: str
    kind: str
    device: str
    pid: int | None
    generation: int
    restarts: int
    status: str
    lost: str | None = None
    ranks: tuple[int, ...] = ()
    running: int = 0
    waiting: int = 0
    pending_tokens: int | None = None
    rings: dict[str, dict[str, list[int]]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


class Named(Protocol):
    """What the engine must know of a device."""

    @property
    def name(self) -> str:
        """What the user calls it."""
        ...

    def release_threads(self) -> None:
        """End the compute threads that wait for the calling thread."""


class StepRunner(Protocol):
    """What the engine runs steps on."""

    @property
    def profile(self) -> Profile:
        """Where stages are timed."""
        ...

    @property
    def cache(self) -> Any:
        """The KV cache, or what is known of it where it is in another process."""
        ...

    @property
    def device(self) -> Named:
        """Where it runs."""
        ...

    def execute(self, items: Sequence[BatchItem]) -> list[ItemResult]:
        """Run one step; the result has an entry per item, in the same order."""
        ...

    def examine(self, items: Sequence[BatchItem]) -> tuple[list[ItemResult], Tensor | None]:
        """Run one step, and return the logits [R, V] of the items that draw, too."""
        ...


def place(config: EngineConfig, name: str) -> str:
    """Return where steps on the device `name` run, `inline` or `process`; `auto` is what its kind wants.

    Isolated devices have a process each, but for the last: nobody would go on where that one fails.
    Of several ranks each is a process.

    Raises ConfigError for an unknown device.
    """
    if config.worker.tensor_parallel_size > 1:
        return "process"
    if config.worker.workers != "auto":
        return config.worker.workers
    if config.device.isolate and name != config.device.devices[-1]:
        return "process"
    return device_class(name.partition(":")[0], name).workers
