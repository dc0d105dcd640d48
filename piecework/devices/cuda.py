"""NVIDIA GPUs through torch.cuda, with CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor

from piecework.devices.base import Device, GraphMode, Phase
from piecework.devices.captured import CapturedGraph
from piecework.errors import CaptureError, ConfigError, DeviceError
from piecework.ops import get
from piecework.ops.triton.available import installed

T = TypeVar("T")
_KV_SHARE = 0.8  # of free memory; the rest is for activations
_AMPERE = (8, 0)  # the first compute capability that multiplies bfloat16 in hardware


class CudaGraph(CapturedGraph):
    """A CUDA graph: one launch replays all kernels. See docs.pytorch.org/docs/stable/notes/cuda.html."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph

    def replay(self) -> None:
        """Launch the graph on the current stream; returns before it has run."""
        if self._graph is None:
            raise CaptureError("a released graph can't be replayed")
        self._graph.replay()

    def release(self) -> None:
        """Destroy the graph."""
        if self._graph is not None:
            self._graph.reset()
            self._graph = None


class CudaDevice(Device):
    """One GPU. `cuda` is the first, `cuda:1` the second."""

    name = "cuda"
    workers = "process"
    collectives = "nccl"
    captures_collectives = True
    numbered = True
    op_order = ("triton", "cuda", "reference")
    compilers = ("eager", "inductor", "dynamo")
    captures = True

    def __init__(self, index: int = 0) -> None:
        if not torch.cuda.is_available():
            raise ConfigError("device", "cuda", "a machine with a GPU and a torch built for CUDA")
        if index >= torch.cuda.device_count():
            allowed = f"cuda:0 to cuda:{torch.cuda.device_count() - 1}"
            raise ConfigError("device", f"cuda:{index}", allowed)
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        # Captures share one stream, since a pool's memory is bound to the stream that it was used on.
        self._stream = torch.cuda.Stream(self.torch_device)

    @classmethod
    def from_options(cls, options: str) -> CudaDevice:
        """Take the GPU's number from what follows the colon."""
        if options and not options.isdecimal():
            raise ConfigError("device", f"cuda:{options}", "cuda or cuda:<number>")
        return cls(int(options or 0))

    def default_dtype(self, stored: str | None = None) -> torch.dtype:
        """bfloat16 where the GPU has it in hardware, else float16."""
        capable = torch.cuda.get_device_capability(self.torch_device) >= _AMPERE
        return torch.bfloat16 if capable else torch.float16

    def supports_dtype(self, dtype: torch.dtype) -> bool:
        """float32 and float16 always, bfloat16 where the GPU has it."""
        return dtype in (torch.float32, torch.float16, self.default_dtype())

    def fingerprint(self) -> str:
        """Return the GPU's name, and whether Triton's kernels can run."""
        kernels = "triton" if installed() else "torch"
        return f"{torch.cuda.get_device_name(self.torch_device)}, {kernels}"

    def free_memory(self) -> int:
        """Return what the driver reports as free, after torch gave back what it only kept for later."""
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        return int(free)

    def default_kv_cache_memory(self, free: int) -> int:
        """Return most of what is free; a server has the GPU to itself."""
        return int(free * _KV_SHARE)

    def synchronize(self) -> None:
        """Wait for all streams of the GPU."""
        torch.cuda.synchronize(self.torch_device)

    def place(self, tensor: Tensor) -> Tensor:
        """Return `tensor` on the GPU; a copy is under way, ahead of all that is launched later."""
        return tensor.to(self.torch_device, non_blocking=True)

    def graph_modes(self, phase: Phase) -> tuple[GraphMode, ...]:
        """Leave `full` out where paged attention has no kernel that reads lengths from device memory.

        The reference reads them on the host, which a capture can't wait for.
        """
        modes = super().graph_modes(phase)
        kernels = {i.name for i in get("paged_attention").candidates(self.op_order)} - {"reference"}
        return modes if kernels else tuple(mode for mode in modes if mode != "full")

    def new_pool(self) -> Any:
        """Make a memory pool for captures."""
        return torch.cuda.graph_pool_handle()

    def warm_up(self, fn: Callable[[], T]) -> T:
        """Run `fn` on the stream of captures, where libraries allocate what they keep per stream."""
        with _on(self._stream):
            result = fn()
        self.synchronize()
        return result

    def capture(self, fn: Callable[[], T], pool: Any) -> tuple[CapturedGraph, T]:
        """Record what `fn` launches, and launch it once, which is when the driver gives a graph its memory.

        `torch.cuda.graph` would empty the allocator's cache at every capture, and there are thousands.
        """
        graph = torch.cuda.CUDAGraph()
        self.synchronize()
        try:
            with _on(self._stream):
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    result = fn()
                except BaseException:
                    with suppress(RuntimeError):  # an invalid capture has to be ended, too
                        graph.capture_end()
                    raise
                graph.capture_end()
                graph.replay()
        except torch.cuda.OutOfMemoryError as error:
            raise DeviceError(self.name, "capture", str(error)) from error
        except RuntimeError as error:
            raise CaptureError(f"the CUDA capture failed: {error}") from error
        return CudaGraph(graph), result

    def weak_reference(self, tensor: Tensor) -> Tensor:
        """Return a tensor at the same address that doesn't own it.

        Goes through the CUDA array interface (numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html),
        which torch wraps without a copy; it has no bfloat16, hence the detour over bytes.
        """
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )
        count = storage.nbytes() // tensor.dtype.itemsize * tensor.dtype.itemsize
        flat = torch.as_tensor(_Address(storage.data_ptr(), count), device=tensor.device)
        return flat.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class _Address:
    """Bytes in GPU memory, by address."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 2,
        }


@contextmanager
def _on(stream: torch.cuda.Stream) -> Iterator[None]:
    """Make `stream` current; it begins after what was launched before, and later launches wait for it."""
    outer = torch.cuda.current_stream(stream.device)
    stream.wait_stream(outer)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        outer.wait_stream(stream)
