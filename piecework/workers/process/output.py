"""What a child writes to its standard output and error: passed on to ours, and its end kept."""

from __future__ import annotations

import os
import sys

_KEPT = 4096
_CHUNK = 2**16


class Output:
    """The reading end of the pipe that both streams of a child go to."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe
        self._tail = b""
        os.set_blocking(pipe, False)

    def read(self) -> bool:
        """Pass on what is there; False when nothing will come any more."""
        while True:
            try:
                data = os.read(self.pipe, _CHUNK)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._tail = (self._tail + data)[-_KEPT:]
            sys.stderr.write(data.decode(errors="replace"))
            sys.stderr.flush()

    @property
    def tail(self) -> str:
        """The last lines, at most 4 KiB."""
        return self._tail.decode(errors="replace").strip()

    def close(self) -> None:
        """Close the pipe."""
        os.close(self.pipe)
