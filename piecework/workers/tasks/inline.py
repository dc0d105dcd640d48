"""A worker in this process: a thread that does what it is told, one thing after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import count
from queue import SimpleQueue

import torch

from piecework.devices import Device, make_device
from piecework.errors import WorkerError, WorkerLostError
from piecework.workers.endpoint import Endpoint, Region, Scalar
from piecework.workers.tasks.handles import HandleError, nbytes_of
from piecework.workers.tasks.members import Calls, Child
from piecework.workers.tasks.plans import with_plans


class InlineEndpoint:
    """An Endpoint on a device of this process. It has a generation only: a thread isn't restarted.

    Code that hangs can't be ended here, as it can in a process: `close` gives up at its deadline.
    """

    def __init__(self, name: str, calls: Calls, device: Device) -> None:
        self.name = name
        self.device = device.name
        self.generation = 0
        self._calls = calls
        self._device = device
        self._buffers: dict[int, torch.Tensor] = {}
        self._ids = count(1)
        self._work: SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = SimpleQueue()
        self._open: set[Future[None]] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name=f"worker-{name}", daemon=True)
        self._thread.start()

    @property
    def runs_here(self) -> bool:
        """Whether the calling thread is the one that does this worker's tasks."""
        return threading.current_thread() is self._thread

    def malloc(self, nbytes: int) -> int:
        """See Endpoint."""
        buffer = next(self._ids)
        self._buffers[buffer] = torch.empty(nbytes, dtype=torch.uint8, device=self._device.torch_device)
        return buffer

    def free(self, buffer: int) -> None:
        """See Endpoint."""
        del self._buffers[buffer]

    def copy_to(self, target: Region, source: torch.Tensor) -> Future[None]:
        """See Endpoint."""
        return self._submit(lambda: self._copy(self._tensor(target), source))

    def copy_from(self, source: Region, target: torch.Tensor) -> Future[None]:
        """See Endpoint."""
        return self._submit(lambda: self._copy(target, self._tensor(source)))

    def run(self, digest: str, arguments: Sequence[Scalar | Region]) -> Future[None]:
        """See Endpoint."""
        call = self._calls[digest]
        return self._submit(lambda: self._call(call, arguments))

    def close(self, deadline: float) -> None:
        """See Endpoint. What was submitted before is done first, and fails where the deadline is over."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._work.put(None)
        self._thread.join(deadline)
        if self._thread.is_alive():
            with self._lock:
                waiting, self._open = self._open, set()
            for future in waiting:
                future.set_exception(WorkerLostError(self.name, f"{self.name} did not end in {deadline} s"))
        else:
            self._buffers.clear()

    def _submit(self, what: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        with self._lock:
            if self._closed:
                raise WorkerLostError(self.name, f"{self.name} is closed")
            self._open.add(future)
            self._work.put((what, future))
        return future

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            what, future = work
            error: BaseException | None = None
            try:
                what()
            except Exception as raised:
                error = raised
            except BaseException as raised:  # exit() of a task must not end who waits for it
                error = WorkerError(self.name, f"{type(raised).__name__}: {raised}")
            with self._lock:
                waited = future in self._open
                self._open.discard(future)
            if waited and error is not None:
                future.set_exception(error)
            elif waited:
                future.set_result(None)
            del work, what, future, error  # a waiting thread must not keep tensors alive

    def _call(self, call: Callable[..., None], arguments: Sequence[Scalar | Region]) -> None:
        with torch.no_grad():
            call(*[self._tensor(a) if isinstance(a, Region) else a for a in arguments])
        self._device.synchronize()

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.no_grad():
            target.copy_(source)
        self._device.synchronize()

    def _tensor(self, region: Region) -> torch.Tensor:
        nbytes = nbytes_of(region.shape, region.dtype)
        part = self._buffers[region.buffer][region.offset : region.offset + nbytes]
        if part.shape[0] != nbytes:
            raise HandleError("region", region, f"inside its buffer, which ends {nbytes - len(part)} earlier")
        return part.view(region.dtype).view(region.shape)


def inline(device: str = "cpu", name: str | None = None) -> Child:
    """Make a child of this process on a device; `name` tells several on one device apart."""

    def start(calls: Calls) -> Endpoint:
        return InlineEndpoint(name or device, with_plans(calls), make_device(device))

    return start
