"""Address space that is reserved once, and gets and gives back its memory part by part."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from piecework.errors import DeviceError

_NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux: no memory is set aside for pages that are never written to


class Reservation(ABC):
    """A range of addresses as `memory`, uint8 [bytes]. None of it may be used before it is committed.

    Addresses never change, so whoever knows them, as a captured graph does, need not be told.
    """

    memory: Tensor

    @abstractmethod
    def commit(self, start: int, stop: int) -> None:
        """Give the bytes from `start` to `stop` memory, all zero. DeviceError where there is none left."""

    @abstractmethod
    def decommit(self, start: int, stop: int) -> None:
        """Give the memory of these bytes back; what was in them is lost."""


class HostReservation(Reservation):
    """Memory of a process on Linux, which gives a page memory, all zero, when it is first written to.

    madvise(MADV_DONTNEED) takes whole pages back; the rest of a range is set to zero (madvise(2)).
    """

    def __init__(self, size: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        try:
            self._map = mmap.mmap(-1, max(size, 1), flags=flags)
        except (OSError, OverflowError) as error:
            raise DeviceError(
                "cpu", "memory", f"{size} bytes of addresses can't be reserved: {error}"
            ) from error
        with torch.inference_mode(False):
            # The tensor keeps the mapping, which ends with it.
            self.memory = torch.frombuffer(self._map, dtype=torch.uint8)[:size]

    def commit(self, start: int, stop: int) -> None:
        """There is nothing to do: memory comes with the first write, and what was given back is zero."""

    def decommit(self, start: int, stop: int) -> None:
        """Give whole pages back, and set what is left to zero."""
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = stop // mmap.PAGESIZE * mmap.PAGESIZE
        if first >= last:
            self.memory[start:stop] = 0
            return
        self.memory[start:first] = 0
        self.memory[last:stop] = 0
        self._map.madvise(mmap.MADV_DONTNEED, first, last - first)
