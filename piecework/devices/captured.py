"""What a device gives back when it captured work: a graph that is replayed without Python."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

from piecework.errors import CaptureError


class HostUpdate(ABC):
    """New values of host arguments on their way into a captured graph; they count once `join` returned."""

    @abstractmethod
    def join(self) -> None:
        """Wait until the next replay is sure to see the new values."""


class CapturedGraph(ABC):
    """Work that was recorded once, with the addresses it reads and writes.

    A graph owns nothing that it reads: who captures keeps inputs where they are.
    """

    @abstractmethod
    def replay(self) -> None:
        """Run the recorded work again, on the recorded addresses."""

    @abstractmethod
    def release(self) -> None:
        """Give the graph back to the device; it can't be replayed after that. A second call does nothing."""

    def update(self, values: Mapping[str, Tensor]) -> HostUpdate:
        """Replace host arguments, which are frozen at capture, by the names the recorded ops give them.

        `values` are host tensors of the captured shapes. Raises CaptureError where this kind of graph
        has no host arguments to update.
        """
        raise CaptureError(f"a {type(self).__name__} has no host arguments to update: {', '.join(values)}")
