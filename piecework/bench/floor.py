"""What memory allows: how long reading the weights takes at this moment, and how fast a device copies."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from piecework.bench.kernel_timing import Timer, alternate
from piecework.devices import Device
from piecework.devices.cpu import CpuDevice
from piecework.native import library
from piecework.ops.cpu.kernels import Kernel
from piecework.profile import now

_MOST_BYTES = 2**30
_WAKING_WORDS = 1 << 18
_read = Kernel("read", "from total", "words")


class ReadFloor:
    """Reads a buffer of the weights' size with all threads, as often as asked, as fast as memory gives it.

    The read rate of a shared machine changes within minutes, so a benchmark measures the floor between
    its own runs. Above 1 GiB a buffer of that size is read and the time scaled. Several streams of memory
    are read at once, which is faster than torch's one for each thread; torch reads where the kernels can't
    be built.
    """

    def __init__(self, nbytes: float) -> None:
        self.nbytes = nbytes
        words = max(1, int(min(nbytes, _MOST_BYTES)) // 8)
        self._buffer = torch.ones(words, dtype=torch.int64)
        self._total = torch.zeros(1, dtype=torch.int64)
        self._scale = nbytes / self._buffer.nbytes
        self._device = CpuDevice()
        self._device.release_threads()  # which filled the buffer: see `read`

    def read(self) -> float:
        """Return the seconds that one read of all bytes takes."""
        self._sum(self._buffer[:_WAKING_WORDS])  # the first loop starts the threads
        start = now()
        total = self._sum(self._buffer)
        seconds = now() - start
        self._device.release_threads()  # or the engine's would be put to sleep from now on
        if total != self._buffer.numel():
            raise RuntimeError(f"read {total} of {self._buffer.numel()} words")
        return seconds * self._scale

    def _sum(self, buffer: Tensor) -> int:
        if library() is None:
            return int(buffer.sum())
        _read(buffer.data_ptr(), self._total.data_ptr(), buffer.numel())
        return int(self._total)


class CopyLimit:
    """How fast a device copies: the bound of kernels that read and write memory once.

    A buffer that fits into a cache is copied faster than memory allows. So the limit of n bytes is the
    best rate among buffers of n bytes and more, as far as `sizes` go.
    """

    sizes = tuple(1 << power for power in range(16, 28, 2))

    def __init__(self, device: Device, timer: Timer, repeats: int = 3) -> None:
        self._device = device
        samples = [timer.sample(self.copy(size)) for size in self.sizes]
        times = [min(taken) for taken in alternate(samples, repeats)]
        self._rates: list[float] = [size / seconds for size, seconds in zip(self.sizes, times, strict=True)]

    def copy(self, nbytes: int) -> Callable[[], Tensor]:
        """Return a function that reads half of `nbytes` and writes the other half."""
        words = max(1, nbytes // 8)
        source, target = (self._device.zeros((words,), torch.float32) for _ in range(2))
        return lambda: target.copy_(source)

    def rate(self, nbytes: int) -> float:
        """Return bytes per second."""
        above = [rate for size, rate in zip(self.sizes, self._rates, strict=True) if size >= nbytes]
        return max(above or self._rates[-1:])
