"""Memory that two processes share: files without a name (memfd), or named ones where there are none.

A segment is made here, its file descriptor goes to the child beside a message, and the child maps it when
it is first used. Nothing of it is left in /dev/shm when both die.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, cast

_SMALLEST = 2**16
HAS_MEMFD = hasattr(os, "memfd_create")


class Segment(Protocol):
    """Shared bytes. `name` is empty where the child gets a file descriptor instead."""

    size: int
    name: str

    @property
    def fds(self) -> tuple[int, ...]:
        """The file descriptors to send, with which the child maps it."""
        ...

    @property
    def memory(self) -> memoryview:
        """The bytes. What is made of it must be gone before `close`."""
        ...

    def close(self) -> None:
        """Let go of the memory; BufferError while something looks at it."""
        ...


class MemfdSegment:
    """A mapped memfd; see memfd_create(2)."""

    name = ""

    def __init__(self, size: int, fd: int | None = None) -> None:
        """Make one of `size` bytes, or map one that was received; the descriptor is ours from now on."""
        self.size = size
        self._fd = os.memfd_create("piecework", os.MFD_CLOEXEC) if fd is None else fd
        if fd is None:
            os.ftruncate(self._fd, size)
        self._map = mmap.mmap(self._fd, size)
        self.memory = memoryview(self._map)

    @property
    def fds(self) -> tuple[int, ...]:
        """See Segment."""
        return (self._fd,)

    def close(self) -> None:
        """See Segment."""
        self.memory.release()
        self._map.close()
        os.close(self._fd)


class NamedSegment:
    """A multiprocessing.shared_memory block. Who made it removes the name when it closes it."""

    fds: tuple[int, ...] = ()

    def __init__(self, size: int, name: str = "") -> None:
        """Make one of `size` bytes, or open one by its name."""
        from multiprocessing import resource_tracker
        from multiprocessing.shared_memory import SharedMemory

        self._shared = SharedMemory(name or None, create=not name, size=size)
        self._owned = not name
        if name:  # the tracker of a process that only opened it would remove it, and complain
            resource_tracker.unregister(self._shared._name, "shared_memory")  # type: ignore[attr-defined]
        self.size = size
        self.name = self._shared.name
        self.memory = memoryview(cast(memoryview, self._shared.buf))

    def close(self) -> None:
        """See Segment."""
        self.memory.release()
        self._shared.close()
        if self._owned:
            self._shared.unlink()


def make_segment(size: int, *, memfd: bool = HAS_MEMFD) -> Segment:
    """Make a segment of at least `size` bytes: a power of two, so that it can be used again."""
    rounded = max(_SMALLEST, 1 << (size - 1).bit_length())
    return MemfdSegment(rounded) if memfd else NamedSegment(rounded)


def open_segment(size: int, name: str, fds: tuple[int, ...]) -> Segment:
    """Map a segment that another process made."""
    return NamedSegment(size, name) if name else MemfdSegment(size, fds[0])


class SegmentPool:
    """Segments of one child by number. Free ones are used again, and kept up to `kept` bytes."""

    def __init__(self, kept: int = 2**26, *, memfd: bool = HAS_MEMFD) -> None:
        self._kept = kept
        self._memfd = memfd
        self._segments: dict[int, Segment] = {}
        self._free: set[int] = set()
        self._made = 0

    def take(self, size: int) -> tuple[int, Segment, bool]:
        """Return a segment that nobody has: its number, itself, and whether it is new to the child."""
        fitting = [number for number in self._free if self._segments[number].size >= size]
        if fitting:
            number = min(fitting, key=lambda n: self._segments[n].size)
            self._free.discard(number)
            return number, self._segments[number], False
        number, self._made = self._made, self._made + 1
        self._segments[number] = make_segment(size, memfd=self._memfd)
        return number, self._segments[number], True

    def give_back(self, number: int) -> list[int]:
        """Make a segment free; returns those that were closed, which the child should close too."""
        self._free.add(number)
        closed = []
        while sum(self._segments[n].size for n in self._free) > self._kept:
            largest = max(self._free, key=lambda n: self._segments[n].size)
            self._free.discard(largest)
            self._segments.pop(largest).close()
            closed.append(largest)
        return closed

    def drop(self, number: int) -> None:
        """Close a segment that nobody has, and that the child does not know or will be told to forget."""
        self._segments.pop(number).close()

    def close(self) -> None:
        """Close all; the child must be dead."""
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
        self._free.clear()


@contextmanager
def part(segment: Segment, size: int) -> Iterator[memoryview]:
    """Lend the first bytes of a segment, for the time of the block."""
    view = segment.memory[:size]
    yield view
    view.release()  # after an error who still looks into it does that
