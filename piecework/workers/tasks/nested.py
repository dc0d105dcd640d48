"""A worker with workers below it, as the endpoint of the worker above."""

from __future__ import annotations

from functools import partial

from piecework.devices import make_device
from piecework.workers.endpoint import Endpoint
from piecework.workers.tasks.inline import InlineEndpoint
from piecework.workers.tasks.members import Calls
from piecework.workers.tasks.plans import with_plans
from piecework.workers.tasks.worker import Worker


class Nested:
    """A child that is a worker of level 3: its memory is the host's, and its functions orchestrate.

    They get the worker as their first argument (`Function.of(fn, skip=1, ...)`) and host tensors.
    """

    def __init__(self, worker: Worker, name: str) -> None:
        self.worker = worker
        self.level = worker.level
        self.name = name

    def __call__(self, calls: Calls) -> Endpoint:
        """Start the worker and return what the one above talks to."""
        self.worker.start()
        own = {digest: partial(call, self.worker) for digest, call in calls.items()}
        return NestedEndpoint(self.name, with_plans(own), self.worker)


class NestedEndpoint(InlineEndpoint):
    """Closes the worker that it stands for, too."""

    def __init__(self, name: str, calls: Calls, worker: Worker) -> None:
        super().__init__(name, calls, make_device("cpu"))
        self._worker = worker

    @property
    def runs_here(self) -> bool:
        """See InlineEndpoint; or those of workers below."""
        return super().runs_here or self._worker.runs_here

    def close(self, deadline: float) -> None:
        """See Endpoint. The workers below end first, so that what waits for them fails."""
        self._worker.close(deadline)
        super().close(deadline)
