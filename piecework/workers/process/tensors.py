"""The child's side of ProcessEndpoint: buffers on a device, copies, and calls of functions on them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import NamedTuple

from piecework.collector import imports_stay
from piecework.workers.process.host import Context
from piecework.workers.process.messages import decode, encode
from piecework.workers.process.segments import Segment, open_segment, part

with imports_stay():
    import torch

    from piecework.devices import make_device
    from piecework.workers.tasks.plans import with_plans

Scalar = int | float | bool | str


class Place(NamedTuple):
    """A Region as it travels; `dtype` is torch's name of it (`float32`)."""

    buffer: int
    offset: int
    shape: tuple[int, ...]
    dtype: str


class Argument(NamedTuple):
    """One argument of a call: a scalar, a tensor at a place, or bytes, which a union with text can't hold."""

    scalar: Scalar | None = None
    place: Place | None = None
    data: bytes | None = None


class Shared(NamedTuple):
    """A segment as it travels, by its number; `size` and `name` say how to map it at its first use."""

    number: int
    size: int
    name: str


class Copy(NamedTuple):
    """Copy a region from or to the beginning of a segment. `forget` are segments that nobody needs."""

    region: Place
    segment: Shared
    forget: list[int]


class Run(NamedTuple):
    """Call the function of a digest."""

    digest: str
    arguments: list[Argument]


class Options(NamedTuple):
    """The device, and the functions by digest as a pickle, which names each by its module."""

    device: str
    calls: bytes


class TensorHost:
    """Keeps buffers and answers `malloc`, `free`, `copy_to`, `copy_from` and `run`."""

    def __init__(self, context: Context) -> None:
        options = decode(Options, context.options)
        self._device = make_device(options.device)
        self._calls: Mapping[str, Callable[..., None]] = with_plans(pickle.loads(options.calls))
        self._buffers: dict[int, torch.Tensor] = {}
        self._segments: dict[int, Segment] = {}
        self._ids = count(1)
        self.info = b""

    @torch.no_grad()
    def handle(self, method: str, body: bytes, fds: tuple[int, ...]) -> bytes:
        """Answer one call; the work of a device is done when it returns."""
        match method:
            case "malloc":
                return encode(self._malloc(decode(int, body)))
            case "free":
                self._free(decode(int, body))
            case "copy_to" | "copy_from":
                self._copy(decode(Copy, body), method == "copy_to", fds)
            case "run":
                self._run(decode(Run, body))
            case _:
                raise ValueError(f"a worker of tensors has no method {method}")
        return b""

    def close(self) -> None:
        """Let go of buffers and segments."""
        self._buffers.clear()
        self._forget(list(self._segments))

    def _malloc(self, nbytes: int) -> int:
        buffer = next(self._ids)
        self._buffers[buffer] = torch.empty(nbytes, dtype=torch.uint8, device=self._device.torch_device)
        return buffer

    def _free(self, buffer: int) -> None:
        if self._buffers.pop(buffer, None) is None:
            raise ValueError(f"buffer {buffer} is not there to be freed")

    def _copy(self, copy: Copy, to_device: bool, fds: tuple[int, ...]) -> None:
        self._forget(copy.forget)
        segment, tensor = self._segment(copy.segment, fds), self._tensor(copy.region)
        if not tensor.numel():
            return
        with part(segment, tensor.nbytes) as view:
            host = torch.frombuffer(view, dtype=tensor.dtype).view(tensor.shape)
            target, source = (tensor, host) if to_device else (host, tensor)
            target.copy_(source)
            self._device.synchronize()
            del host, target, source  # they look into the segment, which could not be closed

    def _run(self, run: Run) -> None:
        self._calls[run.digest](*map(self._value, run.arguments))
        self._device.synchronize()

    def _value(self, argument: Argument) -> Scalar | bytes | torch.Tensor | None:
        if argument.place is not None:
            return self._tensor(argument.place)
        return argument.scalar if argument.data is None else argument.data

    def _tensor(self, place: Place) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, place.dtype)
        nbytes = _product(place.shape) * dtype.itemsize
        buffer = self._buffers.get(place.buffer)
        if buffer is None:
            raise ValueError(f"buffer {place.buffer} is not there")
        if not 0 <= place.offset <= len(buffer) - nbytes:
            raise ValueError(f"{place} is outside its buffer of {len(buffer)} bytes")
        return buffer[place.offset : place.offset + nbytes].view(dtype).view(place.shape)

    def _segment(self, shared: Shared, fds: tuple[int, ...]) -> Segment:
        if shared.number not in self._segments:
            self._segments[shared.number] = open_segment(shared.size, shared.name, fds)
        return self._segments[shared.number]

    def _forget(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._segments.pop(number).close()


def _product(shape: Sequence[int]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result
