"""Ascend NPUs through torch_npu, with its graphs.

Attention takes sequence lengths from the host there. A captured call of it keeps those of its capture, and
waits at every replay for new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from piecework.devices.base import Device, StandIn
from piecework.devices.captured import CapturedGraph, HostUpdate
from piecework.errors import CaptureError, ConfigError, DeviceError
from piecework.ops.npu.attention import UPDATED
from piecework.ops.npu.vendor import PACKAGE, ascend_triton, available

T = TypeVar("T")
GRAPH_BUDGET = 1800
"""Graphs that a device has room for: each takes one of its 2,048 streams, of which others use some."""
_KV_SHARE = 0.8  # of free memory; the rest is for activations
_ND = 2  # plain strided memory, as torch_npu numbers its formats


def _import() -> Any:
    """Import torch_npu; a ConfigError says why that can't be."""
    wanted = "a machine with an Ascend NPU and torch_npu"
    if not available():
        raise ConfigError("device", "npu", f"{wanted}, which is not installed")
    release = ".".join(torch.__version__.split(".")[:2])
    try:
        package: Any = import_module(PACKAGE)
    except Exception as error:  # the vendor's driver stack is missing, or it was built for another torch
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            "device", "npu", f"{wanted} {release}, which can't be imported: {reason}"
        ) from error
    found = str(package.__version__)
    if found.split(".")[:2] != release.split("."):
        allowed = f"{wanted} {release}, the release for torch {torch.__version__}; {found} is installed"
        raise ConfigError("device", "npu", allowed)
    return package


class NpuGraph(CapturedGraph):
    """A graph of torch_npu.

    A call in it whose host arguments can be replaced begins with a wait for the next update, so a replay
    without one would never end.
    """

    def __init__(self, graph: Any, released: Callable[[], None], before_update: Callable[[], None]) -> None:
        self._graph = graph
        self._released = released
        self._before_update = before_update
        self._waits = bool(graph.graph_dispatch_mode.graph_dispatch_records)
        self._updated = False

    def replay(self) -> None:
        """Launch the graph on the current stream; returns before it has run.

        Raises CaptureError where it waits for an update that was not made and joined since the last replay.
        """
        if self._graph is None:
            raise CaptureError("a released graph can't be replayed")
        if self._waits and not self._updated:
            names = ", ".join(name for name, argument in UPDATED.items() if argument)
            raise CaptureError(f"host arguments ({names}) were not updated since the last replay")
        self._graph.replay()
        self._updated = False

    def update(self, values: Mapping[str, Tensor]) -> HostUpdate:
        """Give every captured call of attention new lengths; they count once they are joined."""
        if self._graph is None:
            raise CaptureError("a released graph can't be updated")
        unknown = sorted(set(values) - set(UPDATED))
        if unknown or not self._waits:
            allowed = ", ".join(UPDATED) if self._waits else "none"
            what = ", ".join(unknown or values)
            raise CaptureError(f"{what} is no host argument of this graph; it has: {allowed}")
        if on_device := [name for name, value in values.items() if value.device.type != "cpu"]:
            raise CaptureError(f"{', '.join(on_device)} must be on the host")
        changed = {argument: values[name].tolist() for name, argument in UPDATED.items() if argument}
        self._before_update()
        self._graph.update(cpu_update_input=[changed])
        return _Update(self._join)

    def _join(self) -> None:
        self._updated = True

    def release(self) -> None:
        """Destroy the graph."""
        if self._graph is not None:
            self._graph.reset()
            self._graph = None
            self._released()


class _Update(HostUpdate):
    """The calls were replaced on a stream of torch_npu's own; the graph waits for that on the device."""

    def __init__(self, joined: Callable[[], None]) -> None:
        self._joined = joined

    def join(self) -> None:
        """Let the graph run once."""
        self._joined()


class NpuDevice(Device):
    """One NPU. `npu` is the first, `npu:1` the second."""

    name = "npu"
    op_order = ("npu", "triton", "reference")
    compilers = ("eager", "dynamo")
    stand_ins = (StandIn("inductor", "eager", "torch_npu has none"),)
    workers = "process"
    collectives = "hccl"
    numbered = True
    captures = True
    graph_budget = GRAPH_BUDGET
    lengths = "host"

    def __init__(self, index: int = 0) -> None:
        self._package: Any = _import()
        self._npu: Any = self._package.npu
        count = self._npu.device_count() if self._npu.is_available() else 0
        if index >= count:
            allowed = (
                f"npu:0 to npu:{count - 1}" if count else "a machine with an Ascend NPU; torch_npu sees none"
            )
            raise ConfigError("device", f"npu:{index}", allowed)
        self._npu.set_device(index)
        # Each thread has a current NPU, the first one at the beginning, and steps run in another thread than
        # this: so streams are asked for by the NPU's number.
        # Captures share one stream, since a pool's memory is bound to the stream that it was used on.
        self._stream = self._npu.Stream()
        self.torch_device: torch.device = self._stream.device
        self._index = index
        self._graphs = 0

    @classmethod
    def from_options(cls, options: str) -> NpuDevice:
        """Take the NPU's number from what follows the colon."""
        if options and not options.isdecimal():
            raise ConfigError("device", f"npu:{options}", "npu or npu:<number>")
        return cls(int(options or 0))

    def default_dtype(self, stored: str | None = None) -> torch.dtype:
        """bfloat16."""
        return torch.bfloat16

    def supports_dtype(self, dtype: torch.dtype) -> bool:
        """bfloat16, float16, and float32, for which torch_npu has neither attention nor int8 products."""
        return dtype in (torch.bfloat16, torch.float16, torch.float32)

    def fingerprint(self) -> str:
        """Return the NPU's name, torch_npu's version, and whether Triton's kernels can run."""
        kernels = "triton" if ascend_triton() else "torch"
        return f"{self._npu.get_device_name(self._index)}, torch_npu {self._package.__version__}, {kernels}"

    def free_memory(self) -> int:
        """Return what the driver reports as free, after torch_npu gave back what it only kept for later."""
        self._npu.empty_cache()
        free, _ = self._npu.mem_get_info(self._index)
        return int(free)

    def default_kv_cache_memory(self, free: int) -> int:
        """Return most of what is free; a server has the NPU to itself."""
        return int(free * _KV_SHARE)

    def synchronize(self) -> None:
        """Wait for all streams of the NPU."""
        self._npu.synchronize(self._index)

    def prepare_weights(self, model: nn.Module) -> None:
        """Move what isn't there yet into the device's memory."""
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = self.place(tensor.data)

    def holds(self, tensor: Tensor) -> bool:
        """Say whether the tensor lies in the device's memory."""
        return tensor.device == self.torch_device

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate a tensor of zeros on the device."""
        return self._empty(shape, dtype).zero_()

    def place(self, tensor: Tensor) -> Tensor:
        """Return `tensor` in the device's memory: itself where it is there already, else a copy."""
        if self.holds(tensor):
            return tensor
        return self._empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate in the plain format: the caches are written row by row, which the others can't be."""
        made: Tensor = self._package.empty_with_format(
            shape, dtype=dtype, device=self.torch_device, acl_format=_ND
        )
        return made

    def new_pool(self) -> Any:
        """Make a memory pool for captures."""
        return self._npu.graph_pool_handle()

    def warm_up(self, fn: Callable[[], T]) -> T:
        """Run `fn` on the stream of captures, where libraries allocate what they keep per stream."""
        outer = self._npu.current_stream(self._index)
        self._stream.wait_stream(outer)
        with self._npu.stream(self._stream):
            result = fn()
        self.synchronize()
        return result

    def capture(self, fn: Callable[[], T], pool: Any) -> tuple[CapturedGraph, T]:
        """Record what `fn` launches, with each call whose host arguments can change as a task of its own.

        Nothing runs: the first replay would wait for an update.
        """
        if self._graphs >= GRAPH_BUDGET:
            raise DeviceError(self.name, "capture", f"no room for more than {GRAPH_BUDGET} graphs")
        graph = self._npu.NPUGraph()
        try:
            with self._npu.graph(graph, pool=pool, stream=self._stream, auto_dispatch_capture=True):
                result = fn()
        except torch.OutOfMemoryError as error:
            raise DeviceError(self.name, "capture", str(error)) from error
        except RuntimeError as error:
            raise CaptureError(f"the NPU capture failed: {error}") from error
        self._graphs += 1
        return NpuGraph(graph, self._graph_released, self._idle), result

    def _graph_released(self) -> None:
        self._graphs -= 1

    def _idle(self) -> None:
        """Wait for the replay before: it may still read the arguments that are about to be replaced."""
        self._npu.current_stream(self._index).synchronize()

    def weak_reference(self, tensor: Tensor) -> Tensor:
        """Return a tensor at the same address that doesn't own it."""
        found: Tensor = self._package._C._weak_ref_tensor(tensor)
        return found
