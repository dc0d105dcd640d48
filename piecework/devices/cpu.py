"""The CPU: the default device."""

from __future__ import annotations

import math
import sys

import numpy as np
import torch
from torch import Tensor

from piecework.devices.base import Device
from piecework.devices.memory import available_host_memory
from piecework.devices.reservation import HostReservation, Reservation
from piecework.native import isa, library, reads_panels

GIB = 2**30


class CpuDevice(Device):
    """All cores of this machine, through torch."""

    name = "cpu"
    torch_device = torch.device("cpu")
    op_order = ("cpu", "reference")
    compilers: tuple[str, ...] = ("native", "eager", "inductor", "openvino", "dynamo")
    int8_kv_cache = True
    collectives: str | None = "gloo"
    chains = True
    relayout = "rows"

    def default_dtype(self, stored: str | None = None) -> torch.dtype:
        """bfloat16, of which a decode step reads half the bytes, where it is fast.

        But float32 for weights that are float32, and beside blocks where kernels don't multiply bfloat16:
        little is left to read then, and the rounding adds to that of the inputs to 8 bits.
        """
        kernels = library() is not None
        if stored == "blocks":
            fast = kernels and isa() == "avx512_bf16"
        else:
            in_torch = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
            fast = stored != "float32" and (kernels or in_torch)
        return torch.bfloat16 if fast else torch.float32

    def supports_dtype(self, dtype: torch.dtype) -> bool:
        """Any float type runs; 16-bit ones are emulated where the CPU lacks them."""
        return dtype in (torch.float32, torch.bfloat16, torch.float16)

    def keeps_blocks(self) -> bool:
        """With the kernels."""
        return library() is not None

    def reads_panels(self) -> bool:
        """With the kernels for AVX-512."""
        return reads_panels()

    def free_memory(self) -> int:
        """Return the host memory that is left."""
        return available_host_memory()

    def default_kv_cache_memory(self, free: int) -> int:
        """Return min(1 GiB, a quarter of free memory): other programs live here too."""
        return min(GIB, free // 4)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate zeros that take memory, and time, only where they are written to: a cache starts empty."""
        # numpy asks the system for zeroed pages, where torch writes the zeros.
        memory = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
        return torch.from_numpy(memory).view(dtype).view(shape)

    def reserve(self, size: int) -> Reservation | None:
        """Reserve address space on Linux; None elsewhere, where madvise means something else."""
        return HostReservation(size) if sys.platform.startswith("linux") else None

    def synchronize(self) -> None:
        """Return at once: calls on the CPU are done when they return."""

    def fingerprint(self) -> str:
        """Return the instruction set of the kernels, or `torch` where there are none."""
        return isa() if library() is not None else "torch"

    def default_compiler(self) -> str:
        """Name the first compiler, which needs the kernels; without them the next one."""
        native = self.compilers[0] == "native" and library() is None
        return self.compilers[1 if native else 0]

    def set_threads(self, threads: int | None) -> None:
        """Set torch's intra-op threads, which are a setting of the process."""
        if threads is not None:
            torch.set_num_threads(threads)

    def release_threads(self) -> None:
        """End the calling thread's team: the OpenMP runtime counts it against those that work."""
        kernels = library()
        if kernels is not None:
            kernels.piecework_release_threads()
