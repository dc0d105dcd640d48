"""Who is told what became of requests."""

from __future__ import annotations

from typing import Protocol

from piecework.engine.outputs import Delta
from piecework.sampling import SamplingParams


class Observer(Protocol):
    """Is told, from the engine thread, of every sequence that ends."""

    def finished(self, params: SamplingParams, delta: Delta) -> None:
        """Take the last delta (with usage and timing) of a sequence."""
