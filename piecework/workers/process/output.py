"""What a child writes to its standard output and error: passed on to ours, and its end kept."""

from __future__ import annotations

import contextlib
import os
import sys

_KEPT = 4096
_CHUNK = 2**16
_MOST_CHUNKS = 16  # of what is left at the end: as much as a pipe holds


class Output:
    """The reading end of the pipe that both streams of a child go to."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe
        self._tail = b""
        os.set_blocking(pipe, False)

    def read(self) -> bool:
        """Pass on some of what is there; False when nothing will come any more.

        It is one look and not all that comes: a child that never stops writing must not keep who reads.
        """
        try:
            data = os.read(self.pipe, _CHUNK)
        except BlockingIOError:
            return True
        if not data:
            return False
        self._tail = (self._tail + data)[-_KEPT:]
        # Our own standard error may be closed, or a pipe that nobody reads any more: not the child's fault.
        with contextlib.suppress(Exception):
            sys.stderr.write(data.decode(errors="replace"))
            sys.stderr.flush()
        return True

    def read_rest(self) -> None:
        """Pass on what a child has left in the pipe; heirs of it may go on writing."""
        for _ in range(_MOST_CHUNKS):
            if not self.read():
                return

    @property
    def tail(self) -> str:
        """The last lines, at most 4 KiB."""
        return self._tail.decode(errors="replace").strip()

    def close(self) -> None:
        """Close the pipe."""
        os.close(self.pipe)
