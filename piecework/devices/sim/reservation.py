"""Reserved address space of `sim`: counted as memory only where it is committed, NaN everywhere else."""

from __future__ import annotations

from torch import Tensor

from piecework.devices.reservation import Reservation
from piecework.devices.sim.memory import SimMemory


class SimReservation(Reservation):
    """A range behind the device's memory. The host gets nothing back: what is given back is poisoned."""

    def __init__(self, memory: SimMemory, size: int) -> None:
        self._memory = memory
        self._committed = memory.reserve(size)
        self.memory: Tensor = self._committed.bytes

    def commit(self, start: int, stop: int) -> None:
        """Take memory from the device for these bytes, which must not be committed, and set them to zero."""
        self._memory.commit(self._committed, stop - start)
        self.memory[start:stop] = 0

    def decommit(self, start: int, stop: int) -> None:
        """Give the device its memory back; a read through a stale address gives NaN."""
        self.memory[start:stop] = 0xFF
        self._memory.commit(self._committed, start - stop)
