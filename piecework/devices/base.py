"""What the engine asks of a kind of hardware."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from piecework.devices.captured import CapturedGraph
from piecework.devices.reservation import Reservation
from piecework.errors import CaptureError, ConfigError

T = TypeVar("T")
GraphMode = Literal["eager", "piecewise", "full"]
Phase = Literal["decode", "prefill"]


class Launchable(Protocol):
    """A compiled piece: flat tensors in and out. `opaque`: it runs code that no op-level record can see."""

    opaque: bool

    def __call__(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None = None) -> Sequence[Tensor]:
        """Run; with `outputs` the results are written into those."""


@dataclass(frozen=True)
class StandIn:
    """The compiler `by` runs where a user asks for `compiler`, because of `reason`."""

    compiler: str
    by: str
    reason: str


class Device(ABC):
    """One piece of hardware. Everything that knows which hardware it is lives in a subclass.

    `name` is what the user wrote (`cpu`), `torch_device` where its tensors live, `op_order` the names of
    the op implementations it prefers, first choice first, `compilers` the names of those it can use for
    pieces, its default first (`dynamo` stands for every `dynamo:<name>`). `stand_ins`: compilers that it
    lacks and that a user gets another one for, with a warning.

    `int8_kv_cache`: whether it has attention over keys and values that are kept in int8.
    `workers`: where steps run unless the user says it, `inline` or in a `process` of their own, which may
    crash or hang without the server.

    `collectives`: the backend of torch.distributed that sums tensors of several such devices; None: there is
    none, so a model can't be divided between them. `captures_collectives`: whether graphs hold such sums.
    `numbered`: whether several of its kind are told apart by a number, `cuda:1`.
    `kv_strategies`: how it can keep keys and values, its default first (docs/kv-cache.md).
    `open_capacity`: a static decode program may leave the capacity open, and serve them all.

    `chains`: whether a step of native pieces may be one call, which goes past `launch`.
    `watches_cache`: whether `notify` is to be shown the KV cache after each step.

    Graphs: `captures` says whether it has them, `graph_budget` how many can exist at once (None: as many
    as fit into memory), `lengths` where captured attention reads sequence lengths: from device memory, or
    from host arguments that are frozen at capture and must be updated before a replay.
    """

    name: str
    torch_device: torch.device
    op_order: tuple[str, ...]
    compilers: tuple[str, ...] = ("eager",)
    stand_ins: tuple[StandIn, ...] = ()
    int8_kv_cache: bool = False
    kv_strategies: tuple[Literal["paged", "static"], ...] = ("paged",)
    open_capacity: bool = False
    workers: Literal["inline", "process"] = "inline"
    collectives: str | None = None
    captures_collectives: bool = False
    numbered: bool = False
    chains: bool = False
    watches_cache: bool = False
    captures: bool = False
    graph_budget: int | None = None
    lengths: Literal["device", "host"] = "device"
    relayout: Literal["blocks", "rows"] = "blocks"

    @classmethod
    def from_options(cls, options: str) -> Device:
        """Make the device from what follows the colon in its name (`sim:host`); most take nothing."""
        if options:
            raise ConfigError("device", f"{cls.name}:{options}", f"{cls.name} without options")
        return cls()

    @abstractmethod
    def default_dtype(self, stored: str | None = None) -> torch.dtype:
        """Return the precision that `dtype=auto` means here.

        `stored` says what the weights are: a precision's name, `blocks` where they stay those of a GGUF
        file, or None where the checkpoint doesn't say.
        """

    @abstractmethod
    def supports_dtype(self, dtype: torch.dtype) -> bool:
        """Say whether models can run in `dtype` here."""

    def keeps_blocks(self) -> bool:
        """Say whether `quantization=auto` leaves the matrices of a GGUF file in their blocks here."""
        return False

    @abstractmethod
    def free_memory(self) -> int:
        """Return the bytes that can still be allocated."""

    @abstractmethod
    def default_kv_cache_memory(self, free: int) -> int:
        """Return the bytes of `free` that the KV cache takes where the user names no size."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until everything that was submitted has run."""

    def fingerprint(self) -> str:
        """Name what a program depends on beside the device's name and op order, such as a driver."""
        return ""

    def default_compiler(self) -> str:
        """Name the compiler that `auto` means here."""
        return self.compilers[0]

    def set_threads(self, threads: int | None) -> None:  # noqa: B027 - most devices have no threads to set
        """Use this many host threads for computation; None leaves the default."""

    def release_threads(self) -> None:  # noqa: B027 - most devices have no threads
        """End the compute threads that wait for the calling thread, which leaves the work to another one."""

    def prepare_weights(self, model: nn.Module) -> None:  # noqa: B027 - most devices take weights as they are
        """Bring the weights of a loaded model, in place, into the form that this device's ops want."""

    def reads_panels(self) -> bool:
        """Say whether this device's ops take weights that are laid out for them (docs/quantisation.md)."""
        return False

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate a tensor of zeros on the device."""
        return torch.zeros(shape, dtype=dtype, device=self.torch_device)

    def reserve(self, size: int) -> Reservation | None:
        """Reserve `size` bytes of address space without memory; None where the device can't do that."""
        return None

    def place(self, tensor: Tensor) -> Tensor:
        """Return `tensor` in the device's memory: itself where it is there already, else a copy."""
        return tensor.to(self.torch_device)

    def graph_modes(self, phase: Phase) -> tuple[GraphMode, ...]:
        """Return the modes that `phase` can run in, the default first.

        Prefill is never captured as a whole: its batches have too many shapes.
        """
        if not self.captures:
            return ("eager",)
        return ("full", "piecewise", "eager") if phase == "decode" else ("piecewise", "eager")

    def new_pool(self) -> Any:
        """Make a memory pool for captures; graphs that never run at the same time may share one."""
        raise CaptureError(f"the device {self.name} captures no graphs")

    def warm_up(self, fn: Callable[[], T]) -> T:
        """Run `fn` as a capture would, without recording: lazy set-up must not happen in a capture."""
        return fn()

    def capture(self, fn: Callable[[], T], pool: Any) -> tuple[CapturedGraph, T]:
        """Record what `fn` does, with memory from `pool`; returns the graph and what `fn` returned.

        The returned tensors own their memory: as long as they live, no other capture in the pool gets it.
        Raises CaptureError where `fn` does something that can't be replayed, DeviceError where the device
        has no room for another graph.
        """
        raise CaptureError(f"the device {self.name} captures no graphs")

    def weak_reference(self, tensor: Tensor) -> Tensor:
        """Return a tensor at the same address that doesn't keep the memory from being used again."""
        raise NotImplementedError(f"the device {self.name} has no weak references to tensors")

    def launch(
        self, piece: Launchable, inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None = None
    ) -> Sequence[Tensor]:
        """Run a piece, during a capture or not; `outputs` are given outside captures only.

        Every call of a piece goes through here, but for chains.
        """
        return piece(inputs, outputs)

    def notify(  # noqa: B027 - hardware has no use for it
        self,
        point: Literal["compile", "capture", "step", "piece", "done", "cache"],
        index: int,
        tensors: Sequence[Tensor] = (),
    ) -> None:
        """Say what happens next: compile of distinct piece, capture, or step number `index`, from 0.

        `piece` is the run of a distinct piece that can move to another device. `done` comes after the step,
        with its results, and `cache` after that, with the pages of the KV cache, where the device watches it.
        This is where a device for tests has its faults.
        """
