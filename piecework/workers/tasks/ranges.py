"""Who wrote and who reads each byte of a buffer: the dependencies of tasks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

_PRUNE = 32  # readers of a part that are kept before those that are done are thrown out


class Finishes(Protocol):
    """What can stand in a map: it is done at some time."""

    @property
    def finished(self) -> bool:
        """Whether nobody needs to wait for it any more."""
        ...


N = TypeVar("N", bound=Finishes)


class _Part(Generic[N]):
    __slots__ = ("readers", "start", "stop", "writer")

    def __init__(self, start: int, stop: int, writer: N | None, readers: list[N]) -> None:
        self.start, self.stop, self.writer, self.readers = start, stop, writer, readers


class RangeMap(Generic[N]):
    """The last writer and the readers since then, of each part of one buffer.

    Parts are disjoint and sorted, cut where accesses begin and end; a byte that nobody touched is in none.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._parts: list[_Part[N]] = []

    def writers(self, start: int, stop: int) -> list[N]:
        """Return who wrote last to bytes from `start` to `stop`."""
        return [part.writer for part in self._overlapping(start, stop) if part.writer is not None]

    def readers(self, start: int, stop: int) -> list[N]:
        """Return who reads what was written last to bytes from `start` to `stop`."""
        return [reader for part in self._overlapping(start, stop) for reader in part.readers]

    def read(self, start: int, stop: int, node: N) -> None:
        """Note that `node` reads these bytes."""
        first, last = self._cut(start, stop)
        place = start
        filled: list[_Part[N]] = []
        for part in self._parts[first:last]:
            if part.start > place:
                filled.append(_Part(place, part.start, None, [node]))
            if len(part.readers) >= _PRUNE:
                part.readers = [reader for reader in part.readers if not reader.finished]
            part.readers.append(node)
            filled.append(part)
            place = part.stop
        if place < stop:
            filled.append(_Part(place, stop, None, [node]))
        self._replace(first, last, filled)

    def write(self, start: int, stop: int, node: N) -> None:
        """Note that `node` writes these bytes: who comes next waits for it alone."""
        first, last = self._cut(start, stop)
        self._replace(first, last, [_Part(start, stop, node, [])])

    def _overlapping(self, start: int, stop: int) -> Iterator[_Part[N]]:
        index = max(bisect_right(self._starts, start) - 1, 0)
        while index < len(self._parts) and self._parts[index].start < stop:
            if self._parts[index].stop > start:
                yield self._parts[index]
            index += 1

    def _cut(self, start: int, stop: int) -> tuple[int, int]:
        """Cut parts at both ends; return which are between."""
        return self._cut_at(start), self._cut_at(stop)

    def _cut_at(self, place: int) -> int:
        """Return the index of the first part that begins at `place` or later, after a cut there."""
        index = bisect_right(self._starts, place - 1)
        if index and self._parts[index - 1].stop > place:
            part = self._parts[index - 1]
            rest = _Part(place, part.stop, part.writer, list(part.readers))
            part.stop = place
            self._parts.insert(index, rest)
            self._starts.insert(index, place)
        return index

    def _replace(self, first: int, last: int, parts: list[_Part[N]]) -> None:
        self._parts[first:last] = parts
        self._starts[first:last] = [part.start for part in parts]
