"""The device `sim`: an accelerator on CPU tensors that is as unforgiving as a real one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from piecework.allocator import give_back_freed
from piecework.devices.base import Device, Launchable
from piecework.devices.captured import CapturedGraph
from piecework.devices.memory import available_host_memory
from piecework.devices.sim.faults import Fault, Faults
from piecework.devices.sim.graph import SimGraph
from piecework.devices.sim.memory import Pool, SimMemory
from piecework.devices.sim.record import Recorder
from piecework.devices.sim.reservation import SimReservation
from piecework.errors import CaptureError, ConfigError, DeviceError

T = TypeVar("T")
GIB = 2**30
GRAPH_BUDGET = 1800  # usable graphs of an Ascend device
_GRAPH_BYTES = 4096
_LAUNCH_BYTES = 256


class SimDevice(Device):
    """An accelerator for tests. Its memory is `SimMemory`, its graphs are lists of recorded operations.

    What it does not simulate: speed, and memory of eager operations, whose results are ordinary CPU
    tensors. A capture refuses to read those, so nothing stays outside by accident.
    """

    name = "sim"
    torch_device = torch.device("cpu")
    op_order = ("sim", "reference")
    compilers = ("eager", "inductor", "dynamo")
    collectives = "gloo"
    captures = True
    kv_strategies = ("paged", "static")

    def __init__(
        self,
        *,
        capacity: int | None = None,
        lengths: Literal["device", "host"] = "device",
        graph_budget: int = GRAPH_BUDGET,
        faults: Sequence[Fault] = (),
    ) -> None:
        self.lengths = lengths
        self.graph_budget: int = graph_budget
        self.faults = Faults(faults)
        self.graphs = 0
        self._captures = 0
        self.memory = SimMemory(capacity or min(8 * GIB, available_host_memory() // 2))
        self._recorder: Recorder | None = None

    @classmethod
    def from_options(cls, options: str) -> SimDevice:
        """`sim` has device-side sequence lengths, `sim:host` host-side ones."""
        if options not in ("", "host"):
            raise ConfigError("device", f"sim:{options}", "sim or sim:host")
        return cls(lengths="host" if options else "device")

    def default_dtype(self, stored: str | None = None) -> torch.dtype:
        """float32, so that results can be compared closely."""
        return torch.float32

    def supports_dtype(self, dtype: torch.dtype) -> bool:
        """Any float type runs."""
        return dtype in (torch.float32, torch.bfloat16, torch.float16)

    def free_memory(self) -> int:
        """Return the bytes of the device's buffer that are free."""
        return self.memory.free_bytes

    def default_kv_cache_memory(self, free: int) -> int:
        """Return min(256 MiB, a quarter of free memory)."""
        return min(GIB // 4, free // 4)

    def synchronize(self) -> None:
        """Return at once: operations are done when they return."""

    def prepare_weights(self, model: nn.Module) -> None:
        """Move every parameter and buffer of `model` into the device's memory."""
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = self.place(tensor.data)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate a tensor of zeros in the device's memory."""
        if self._recorder is not None:
            raise CaptureError("a buffer can't be allocated on sim in the middle of a capture")
        return self.memory.empty(shape, None, dtype).zero_()

    def reserve(self, size: int) -> SimReservation:
        """Reserve addresses behind the device's memory, as many as it has bytes in all."""
        if self._recorder is not None:
            raise CaptureError("nothing can be reserved on sim in the middle of a capture")
        return SimReservation(self.memory, size)

    def place(self, tensor: Tensor) -> Tensor:
        """Return `tensor` in the device's memory: itself where it is there already, else a copy."""
        if self.memory.holds(tensor):
            return tensor
        return self.memory.empty_like(tensor).copy_(tensor)

    def new_pool(self) -> Pool:
        """Make a memory pool for captures."""
        return self.memory.new_pool()

    def capture(self, fn: Callable[[], T], pool: Pool) -> tuple[CapturedGraph, T]:
        """Record what `fn` does; see `Recorder` for what it refuses."""
        if self._recorder is not None:
            raise CaptureError("a capture is running already")
        number, self._captures = self._captures, self._captures + 1
        self.notify("capture", number)
        if self.graphs >= self.graph_budget:
            raise DeviceError(self.name, "capture", f"no room for more than {self.graph_budget} graphs")
        recorder = Recorder(self.memory, pool, self.lengths == "host")
        self._recorder = recorder
        try:
            with recorder.recording():
                result = fn()
        finally:
            self._recorder = None
        overhead = self.memory.allocate(_GRAPH_BYTES + _LAUNCH_BYTES * len(recorder.launches))
        graph = SimGraph(
            self.memory, recorder.launches, recorder.free_at_start, overhead, self._graph_released
        )
        self.graphs += 1
        give_back_freed()  # each operation had its results in host memory first, between records that stay
        return graph, result

    def _graph_released(self) -> None:
        self.graphs -= 1

    def weak_reference(self, tensor: Tensor) -> Tensor:
        """Return a tensor at the same address that owns nothing."""
        return self.memory.alias(tensor)

    def launch(
        self, piece: Launchable, inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None = None
    ) -> Sequence[Tensor]:
        """Run a piece; during a capture an opaque one is recorded as a single operation."""
        if self._recorder is not None and piece.opaque:
            return self._recorder.record_opaque(piece, inputs)
        return piece(inputs, outputs)

    def notify(
        self,
        point: Literal["compile", "capture", "step", "piece", "done", "cache"],
        index: int,
        tensors: Sequence[Tensor] = (),
    ) -> None:
        """Let planned faults happen."""
        if point == "done":
            self.faults.after(index, tensors)
        elif point != "cache":
            self.faults.before(self.name, point, index)
