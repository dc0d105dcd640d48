"""Workers of the next level, as the worker above sees them: an endpoint and the memory it was given."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from piecework.errors import WorkerLostError
from piecework.workers.endpoint import Endpoint, Region, Scalar
from piecework.workers.tasks.handles import Handle, Memory

Calls = Mapping[str, Callable[..., None]]
Child = Callable[[Calls], Endpoint]
"""Starts a worker that knows these functions by their digests."""


@dataclass
class Resident:
    """Device memory of a host tensor's storage.

    `version` is that of the host tensor which the memory is as new as, None where it never was. `written`:
    whether anything is in it.
    """

    generation: int
    buffer: int
    version: int | None = None
    written: bool = False


@dataclass
class Member:
    """A worker below, and what the one above knows of it."""

    endpoint: Endpoint
    memory: Memory = field(init=False)
    residents: dict[int, Resident] = field(default_factory=dict)
    _lost: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.memory = Memory(self.endpoint.name)

    @property
    def name(self) -> str:
        """The endpoint's name."""
        return self.endpoint.name

    def alive(self, generation: int) -> bool:
        """Whether what was allocated in `generation` is still there."""
        return generation == self.endpoint.generation and generation not in self._lost

    def check(self, handle: Handle) -> None:
        """Refuse a handle that can't be used, and every one where the worker is gone."""
        self.memory.check(handle, self.endpoint.generation)
        self.check_alive()

    def malloc(self, nbytes: int) -> tuple[int, int]:
        """Allocate; returns generation and buffer."""
        self.check_alive()
        generation = self.endpoint.generation
        try:
            buffer = self.endpoint.malloc(nbytes)
        except WorkerLostError:
            self._lost.add(generation)
            raise
        self.memory.add(generation, buffer, nbytes)
        return generation, buffer

    def free(self, generation: int, buffer: int) -> None:
        """Give a buffer back; nothing is sent to a worker that is gone, or has forgotten it."""
        if self.alive(generation):
            self.endpoint.free(buffer)

    def discard(self, handle: Handle, why: str) -> None:
        """Give back the buffer of a handle that nobody uses."""
        self.memory.drop(handle.generation, handle.id, why)
        self.free(handle.generation, handle.id)

    def copy_to(self, target: Handle, source: torch.Tensor) -> Future[None]:
        """See Endpoint."""
        return self._watched(lambda: self.endpoint.copy_to(target.region, source))

    def copy_from(self, source: Handle, target: torch.Tensor) -> Future[None]:
        """See Endpoint."""
        return self._watched(lambda: self.endpoint.copy_from(source.region, target))

    def run(self, digest: str, arguments: Sequence[Scalar | Region]) -> Future[None]:
        """See Endpoint."""
        return self._watched(lambda: self.endpoint.run(digest, arguments))

    def key(self, handle: Handle) -> Hashable:
        """Name the handle's buffer among those of all workers."""
        return (self.name, handle.generation, handle.id)

    def check_alive(self) -> None:
        """Raise WorkerLostError where the worker is gone."""
        if not self.alive(self.endpoint.generation):
            raise WorkerLostError(self.name, f"{self.name} died, and was not started again")

    def _watched(self, ask: Callable[[], Future[None]]) -> Future[None]:
        generation = self.endpoint.generation
        try:
            future = ask()
        except WorkerLostError:
            self._lost.add(generation)
            raise
        future.add_done_callback(lambda done: self._see(generation, done.exception()))
        return future

    def _see(self, generation: int, error: BaseException | None) -> None:
        if isinstance(error, WorkerLostError):
            self._lost.add(generation)
