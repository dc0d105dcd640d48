"""An Endpoint in a child process: tensors travel through shared memory, everything else as messages."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from piecework.errors import ConfigError, WorkerLostError
from piecework.workers.endpoint import Endpoint, Region, Scalar
from piecework.workers.process.messages import decode, encode
from piecework.workers.process.process import ChildProcess, Plan
from piecework.workers.process.reap import close_all
from piecework.workers.process.segments import HAS_MEMFD, SegmentPool, part
from piecework.workers.process.tensors import Argument, Copy, Options, Place, Run, Shared

TARGET = "piecework.workers.process.tensors:TensorHost"


class ProcessEndpoint:
    """See Endpoint. `restart` makes the next generation of it, in a new process.

    Functions go to the child once, by name, so that it must be able to import them.
    """

    def __init__(
        self,
        name: str,
        calls: Mapping[str, Callable[..., None]],
        device: str = "cpu",
        *,
        start_timeout: float = 120.0,
        timeout: float | None = 300.0,
        memfd: bool = HAS_MEMFD,
    ) -> None:
        """Start the child and wait until it is ready.

        Args:
            calls: the functions by digest.
            timeout: seconds without an answer after which the child counts as hung.
            memfd: share memory by file descriptors, or by names.

        Raises:
            ConfigError: a function that can't be sent, or a device that there isn't.
            WorkerLostError: the child died in its start, or was not ready in time.
        """
        self.name = name
        self.device = device
        self.generation = 0
        self._timeout = timeout
        self._memfd = memfd
        self._closed = False
        options = encode(Options(device, _pickled(calls)))
        self._plan = Plan(name, TARGET, options, start_timeout)
        self._lock = threading.Lock()  # around the segments
        self._begin()

    @property
    def pid(self) -> int | None:
        """The child's process."""
        return self._child.pid

    @property
    def lost(self) -> WorkerLostError | None:
        """Why the child is dead, None while it lives."""
        return self._child.lost

    def malloc(self, nbytes: int) -> int:
        """See Endpoint."""
        if nbytes <= 0:
            raise ConfigError("nbytes", nbytes, "at least 1")
        return decode(int, self._ask("malloc", encode(nbytes)).result())

    def free(self, buffer: int) -> None:
        """See Endpoint."""
        self._ask("free", encode(buffer)).result()

    def copy_to(self, target: Region, source: torch.Tensor) -> Future[None]:
        """See Endpoint."""
        return self._copy("copy_to", target, source)

    def copy_from(self, source: Region, target: torch.Tensor) -> Future[None]:
        """See Endpoint."""
        return self._copy("copy_from", source, target)

    def run(self, digest: str, arguments: Sequence[Scalar | Region]) -> Future[None]:
        """See Endpoint."""
        sent = [_argument(one) for one in arguments]
        done: Future[None] = Future()
        self._ask("run", encode(Run(digest, sent))).add_done_callback(lambda answer: _settle(done, answer))
        return done

    def restart(self) -> None:
        """Replace a child, dead or alive, by a new one of the next generation; its buffers are gone.

        Raises as the constructor does, and WorkerLostError where the endpoint is closed.
        """
        if self._closed:
            raise WorkerLostError(self.name, f"{self.name} is closed", point="start")
        self._end(2.0)
        self.generation += 1
        self._begin()

    def close(self, deadline: float) -> None:
        """See Endpoint. What was submitted before is done first, as far as the deadline lets it."""
        self._closed = True
        self._end(deadline)

    def _begin(self) -> None:
        self._segments = SegmentPool(memfd=self._memfd)
        self._forget: list[int] = []
        self._child = ChildProcess(self._plan, self.generation)
        try:
            self._child.ready.result()
        except BaseException:
            self._end(2.0)
            raise

    def _end(self, seconds: float) -> None:
        if close_all([self._child], seconds):
            return  # it may still write into the segments; a later call tries again
        with self._lock:
            self._segments.close()

    def _ask(self, method: str, body: bytes, fds: Sequence[int] = ()) -> Future[bytes]:
        return self._child.call(method, body, timeout=self._timeout, fds=fds)

    def _copy(self, method: str, region: Region, tensor: torch.Tensor) -> Future[None]:
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ConfigError("tensor", f"{tensor.device}, strides {tensor.stride()}", "dense, on the CPU")
        if tuple(tensor.shape) != tuple(region.shape) or tensor.dtype != region.dtype:
            raise ConfigError("tensor", (tuple(tensor.shape), tensor.dtype), f"shape and dtype of {region}")
        done: Future[None] = Future()
        host = _bytes(tensor)
        with self._lock:
            number, segment, new = self._segments.take(max(1, tensor.nbytes))
            if method == "copy_to":
                with part(segment, tensor.nbytes) as view:
                    view[:] = host
            shared = Shared(number, segment.size, segment.name)
            forget, self._forget = self._forget, []
        try:
            body = encode(Copy(_place(region), shared, forget))
            answer = self._ask(method, body, segment.fds if new else ())
        except BaseException:
            with self._lock:
                self._forget += forget if new else [*forget, number]
                self._segments.drop(number)
            raise

        def finish(answer: Future[bytes]) -> None:
            with self._lock:
                if answer.exception() is None:
                    if method == "copy_from":
                        with part(segment, tensor.nbytes) as view:
                            host[:] = view
                    self._forget += self._segments.give_back(number)
            _settle(done, answer)

        answer.add_done_callback(finish)
        return done


def process(device: str = "cpu", name: str | None = None) -> Callable[..., Endpoint]:
    """Make a child process on a device; `name` tells several on one device apart."""

    def start(calls: Mapping[str, Callable[..., None]]) -> Endpoint:
        return ProcessEndpoint(name or device, calls, device)

    return start


def _pickled(calls: Mapping[str, Callable[..., None]]) -> bytes:
    for call in calls.values():
        try:
            pickle.dumps(call)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError("functions", call, f"what a child can import ({error})") from error
        if getattr(call, "__module__", "") == "__main__":
            raise ConfigError("functions", call, "of a module that a child can import, and not of __main__")
    return pickle.dumps(dict(calls))


def _argument(value: Scalar | Region) -> Argument:
    if isinstance(value, Region):
        return Argument(place=_place(value))
    return Argument(data=value) if isinstance(value, bytes) else Argument(scalar=value)


def _place(region: Region) -> Place:
    dtype = str(region.dtype).removeprefix("torch.")
    return Place(region.buffer, region.offset, tuple(region.shape), dtype)


def _bytes(tensor: torch.Tensor) -> memoryview:
    flat: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def _settle(done: Future[None], answer: Future[bytes]) -> None:
    error = answer.exception()
    if error is not None:
        done.set_exception(error)
    else:
        done.set_result(None)
