"""The read floor: how long this machine takes, now, to read as many bytes as the weights have."""

from __future__ import annotations

import torch

from piecework.profile import now

_MOST_BYTES = 2**30


class ReadFloor:
    """Reads a buffer of the weights' size with all of torch's threads, as often as asked.

    The read rate of a shared machine changes within minutes, so a benchmark measures the floor between
    its own runs. Above 1 GiB a buffer of that size is read and the time scaled.
    """

    def __init__(self, nbytes: float) -> None:
        self.nbytes = nbytes
        words = max(1, int(min(nbytes, _MOST_BYTES)) // 8)
        self._buffer = torch.ones(words, dtype=torch.int64)
        self._scale = nbytes / self._buffer.nbytes
        self._buffer.sum()  # the first reduction sets up its threads

    def read(self) -> float:
        """Return the seconds that one read of all bytes takes."""
        start = now()
        total = self._buffer.sum().item()
        seconds = now() - start
        if total != self._buffer.numel():
            raise RuntimeError(f"read {total} of {self._buffer.numel()} words")
        return seconds * self._scale
