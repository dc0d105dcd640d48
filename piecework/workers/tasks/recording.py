"""Writes down what a worker is asked to do, for tests of the order of operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from piecework.errors import WorkerLostError
from piecework.workers.endpoint import Endpoint, Region, Scalar
from piecework.workers.tasks.members import Calls, Child


@dataclass
class Record:
    """What was asked of all workers that write into it, in order: `(worker, operation, detail)`."""

    operations: list[tuple[str, str, object]] = field(default_factory=list)

    def names(self, worker: str | None = None) -> list[str]:
        """Return the operations' names, of one worker or of all."""
        return [name for who, name, _ in self.operations if worker in (None, who)]


class RecordingEndpoint:
    """Hands everything on to another endpoint and writes it down. `die` makes it a dead worker."""

    def __init__(self, inner: Endpoint, record: Record, names: Mapping[str, str] | None = None) -> None:
        self._inner = inner
        self._names = names or {}
        self.record = record
        self.name = inner.name
        self.generation = inner.generation
        self.dead = False

    def die(self, restart: bool = False) -> None:
        """Answer every call from now on with WorkerLostError, or be a new generation without memory."""
        self.dead = not restart
        self.generation += restart

    def malloc(self, nbytes: int) -> int:
        """See Endpoint."""
        self._note("malloc", nbytes)
        return self._inner.malloc(nbytes)

    def free(self, buffer: int) -> None:
        """See Endpoint."""
        self._note("free", buffer)
        self._inner.free(buffer)

    def copy_to(self, target: Region, source: torch.Tensor) -> Future[None]:
        """See Endpoint."""
        return self._ask("copy_to", target.buffer, lambda: self._inner.copy_to(target, source))

    def copy_from(self, source: Region, target: torch.Tensor) -> Future[None]:
        """See Endpoint."""
        return self._ask("copy_from", source.buffer, lambda: self._inner.copy_from(source, target))

    def run(self, digest: str, arguments: Sequence[Scalar | Region]) -> Future[None]:
        """See Endpoint."""
        return self._ask("run", self._names.get(digest, digest), lambda: self._inner.run(digest, arguments))

    def close(self, deadline: float) -> None:
        """See Endpoint."""
        self.record.operations.append((self.name, "close", None))
        self._inner.close(deadline)

    def _ask(self, name: str, detail: object, ask: Callable[[], Future[None]]) -> Future[None]:
        self.record.operations.append((self.name, name, detail))
        if not self.dead:
            return ask()
        failed: Future[None] = Future()
        failed.set_exception(WorkerLostError(self.name, f"{self.name} died"))
        return failed

    def _note(self, name: str, detail: object) -> None:
        self.record.operations.append((self.name, name, detail))
        if self.dead:
            raise WorkerLostError(self.name, f"{self.name} died")


def recorded(child: Child, record: Record, names: Mapping[str, str] | None = None) -> Child:
    """Make a child whose operations are written down; `names` says what digests are called."""

    def start(calls: Calls) -> Endpoint:
        return RecordingEndpoint(child(calls), record, names)

    return start
