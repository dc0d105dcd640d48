"""The memory of `sim`: one buffer, blocks cut from it, and NaN wherever nothing is.

A block is a storage of its own over its part of the buffer. The finalizer of what the storage holds on to
is the free event. Free bytes are 0xFF, which is NaN in every float type and -1 in every integer type, so a
read through a stale address shows in the results. Captures allocate from pools, whose memory comes from the
same buffer and goes back only when the pool is gone.

Behind it lie as many addresses again, for reservations. What is committed there counts as taken from the
buffer, which then has as many free bytes less, wherever those are.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from piecework.devices.sim.ranges import FreeRanges, Range
from piecework.errors import DeviceError

_ALIGNMENT = 64
_SEGMENT = 1 << 16  # a pool grows by multiples of this
_POISON = 0xFF


class Pool:
    """Memory for captures, shared by graphs that never run at the same time."""

    def __init__(self) -> None:
        self.free = FreeRanges()
        self.reserved = 0


@dataclass(eq=False)
class Committed:
    """A reservation: its bytes, uint8 [size], and how many of them count as taken."""

    bytes: Tensor
    count: int = 0


class SimMemory:
    """An allocator over one buffer of `capacity` bytes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._bytes = np.empty(2 * capacity, np.uint8)  # the kernel commits a page at its first write
        self._address: int = self._bytes.ctypes.data
        first = -self._address % _ALIGNMENT
        self._free = FreeRanges()
        self._free.add(first, capacity)
        self._used_up_to = first
        self._reserved = Pool()
        self._reserved.free.add(capacity + first, 2 * capacity)
        self._reservations: weakref.WeakSet[Committed] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._returned: deque[tuple[Pool | None, int, int]] = deque()

    @property
    def free_bytes(self) -> int:
        """Bytes that nobody has, in whatever pieces."""
        self.settle()
        return self._free.total - self._committed

    @property
    def _committed(self) -> int:
        return sum(reservation.count for reservation in self._reservations)

    def holds(self, tensor: Tensor) -> bool:
        """Say whether the tensor lies here; one without bytes lies everywhere."""
        storage = tensor.untyped_storage()
        return storage.nbytes() == 0 or 0 <= storage.data_ptr() - self._address < self._bytes.nbytes

    def allocate(self, size: int, pool: Pool | None = None) -> Tensor:
        """Return `size` poisoned bytes, from `pool` or from the common memory; uint8 [size]."""
        if size == 0:
            return torch.empty(0, dtype=torch.uint8)
        self.settle()
        rounded = -(-size // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            start = self._take(rounded) if pool is None else self._take_from(pool, rounded)
        block = self._bytes[start : start + size]
        # torch's storage keeps `block`, and nothing else does.
        finalizer = weakref.finalize(block, self._give_back, pool, start, start + rounded)
        finalizer.atexit = False
        with torch.inference_mode(False):
            return torch.from_numpy(block)

    def empty_like(self, tensor: Tensor, pool: Pool | None = None) -> Tensor:
        """Return a poisoned tensor with the shape, strides and type of `tensor`, in a block of its own."""
        return self.empty(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, pool)

    def empty(
        self,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None,
        dtype: torch.dtype,
        pool: Pool | None = None,
    ) -> Tensor:
        """Return a poisoned tensor in a block of its own; `strides` None is contiguous."""
        if strides is None:
            strides = torch.empty(shape, device="meta").stride()
        count = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        with torch.inference_mode(False):
            return self.allocate(count * dtype.itemsize, pool).view(dtype).as_strided(shape, strides)

    def reserve(self, size: int) -> Committed:
        """Return `size` poisoned bytes of addresses that count as taken only where they are committed."""
        self.settle()
        if size > self._reserved.free.total:
            reason = f"{size} bytes of addresses wanted, {self._reserved.free.total} are left"
            raise DeviceError("sim", "memory", reason)
        reservation = Committed(self.allocate(size, self._reserved))
        reservation.bytes.fill_(_POISON)
        self._reservations.add(reservation)
        return reservation

    def commit(self, reservation: Committed, count: int) -> None:
        """Count `count` bytes more as taken, or fewer; DeviceError where that many are not free."""
        if count > self.free_bytes:
            reason = f"{count} bytes wanted, {self.free_bytes} of {self.capacity} are free"
            raise DeviceError("sim", "memory", reason)
        reservation.count += count

    def alias(self, tensor: Tensor) -> Tensor:
        """Return a tensor at the address of `tensor`, which must lie here, that owns nothing."""
        storage = tensor.untyped_storage()
        with torch.inference_mode(False):
            if storage.nbytes() == 0:
                return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            start = storage.data_ptr() - self._address
            flat = torch.from_numpy(self._bytes[start : start + storage.nbytes()])
            # The element count of a typed view is rounded down; a view never ends in the odd rest.
            flat = flat[: storage.nbytes() // tensor.dtype.itemsize * tensor.dtype.itemsize]
            return flat.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def poison(self, ranges: Iterable[Range]) -> None:
        """Overwrite `ranges` with what free memory holds."""
        for start, stop in ranges:
            self._bytes[start:stop] = _POISON

    def settle(self) -> None:
        """Take back what was freed. A finalizer may run at any time, so frees wait here for the lock."""
        while self._returned and self._lock.acquire(blocking=False):
            try:
                while self._returned:
                    self._process(*self._returned.popleft())
            finally:
                self._lock.release()

    def new_pool(self) -> Pool:
        """Make a pool; its memory comes back once the pool and all tensors in it are gone."""
        pool = Pool()
        weakref.finalize(pool, self._give_back_all, pool.free).atexit = False
        return pool

    def _give_back_all(self, free: FreeRanges) -> None:
        self._returned.extend((None, start, stop) for start, stop in free.snapshot())
        self.settle()

    def _give_back(self, pool: Pool | None, start: int, stop: int) -> None:
        self._returned.append((pool, start, stop))
        self.settle()

    def _process(self, pool: Pool | None, start: int, stop: int) -> None:
        self.poison([(start, stop)])
        (self._free if pool is None else pool.free).add(start, stop)

    def _take(self, size: int) -> int:
        free = self._free.total - self._committed
        start = self._free.take(size) if size <= free else None
        if start is None:
            reason = f"{size} bytes wanted, {free} of {self.capacity} are free"
            raise DeviceError("sim", "memory", reason)
        if start + size > self._used_up_to:  # never given out before, so not poisoned yet
            self.poison([(max(start, self._used_up_to), start + size)])
            self._used_up_to = start + size
        return start

    def _take_from(self, pool: Pool, size: int) -> int:
        start = pool.free.take(size)
        if start is None:
            segment = -(-size // _SEGMENT) * _SEGMENT
            grown = self._take(segment)
            pool.reserved += segment
            pool.free.add(grown, grown + segment)
            start = pool.free.take(size)
        if start is None:
            raise DeviceError("sim", "memory", f"a pool that grew has no {size} bytes")
        return start
