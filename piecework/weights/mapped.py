"""A file mapped into memory, whose pages are given back as they are read.

Mapped pages count as the process's memory for as long as they are mapped in, so a loader that only
maps would hold the file and the weights at once.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from piecework.errors import ModelError

RELEASE = 2**22  # bytes that are read before pages are given back
# The kernel maps in pages around the one that is read; so far from what was read they are given back too.
AROUND = 2**21


class MappedFile:
    """A read-only mapping of `path`; raises ModelError where it can't be opened. May be used by threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise ModelError(f"{path}: no such file") from error
        except (OSError, ValueError) as error:  # mmap refuses an empty file with a ValueError
            raise ModelError(f"{path}: cannot be read ({error})") from error
        self.size = len(self._map)
        self._lock = threading.Lock()
        self._read, self._first, self._end = 0, self.size, 0  # bytes, and where they lie, since a release

    def copy(self, start: int, count: int) -> npt.NDArray[np.uint8]:
        """`count` bytes from `start` on, as a writable array of its own."""
        with self.lend(start, count) as mapped:
            return mapped.copy()

    @contextmanager
    def lend(self, start: int, count: int) -> Iterator[npt.NDArray[np.uint8]]:
        """Hand out `count` bytes from `start` on as they lie in the mapping, until the block ends.

        The file can't be closed as long as the array is kept.
        """
        yield np.frombuffer(self._map, np.uint8, count, start)
        with self._lock:
            self._read += count
            self._first, self._end = min(self._first, start), max(self._end, start + count)
            if self._read >= RELEASE:
                self._release()

    def _release(self) -> None:
        first = max(0, self._first - AROUND)
        first -= first % mmap.PAGESIZE
        if hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED, first, min(self.size, self._end + AROUND) - first)
        self._read, self._first, self._end = 0, self.size, 0

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()

    def __enter__(self) -> MappedFile:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
