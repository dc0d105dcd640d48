"""Handles of workers' memory, and the book that says which of them still stand for something."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from piecework.errors import PieceworkError
from piecework.workers.endpoint import Region

_MOST_BYTES = 2**63 - 1  # what an address can count
_REMEMBERED = 1024  # freed buffers of which is known why they are gone


class HandleError(PieceworkError, ValueError):
    """A handle or a tensor that can't be used; `field` says which of its fields is wrong."""

    def __init__(self, field: str, value: Any, allowed: str) -> None:
        self.field = field
        self.value = value
        super().__init__(f"{field}={value!r} is not allowed: {allowed}")


@dataclass(frozen=True)
class Handle:
    """A dense tensor in the memory of one worker: `offset` bytes into buffer `id` of a generation of it."""

    worker: str
    generation: int
    id: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return nbytes_of(self.shape, self.dtype)

    @property
    def region(self) -> Region:
        """What an endpoint is told."""
        return Region(self.id, self.offset, self.shape, self.dtype)

    def view(self, offset: int, shape: Sequence[int], dtype: torch.dtype | None = None) -> Handle:
        """Return a handle of a part that begins `offset` bytes into this one; it is checked when used."""
        kind = dtype or self.dtype
        return replace(self, offset=self.offset + offset, shape=tuple(shape), dtype=kind)


class Memory:
    """Which buffers one worker has, and their sizes. A new generation has none of those before."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self._sizes: dict[tuple[int, int], int] = {}
        self._freed: dict[tuple[int, int], str] = {}

    def add(self, generation: int, buffer: int, nbytes: int) -> None:
        """Note a new buffer."""
        self._sizes[generation, buffer] = nbytes

    def drop(self, generation: int, buffer: int, why: str) -> None:
        """Note that a buffer is gone; `why` is what later users of it are told."""
        del self._sizes[generation, buffer]
        self._freed[generation, buffer] = why
        if len(self._freed) > _REMEMBERED:
            del self._freed[next(iter(self._freed))]

    def buffers(self, generation: int) -> set[int]:
        """Return the buffers of a generation that were not freed."""
        return {buffer for made, buffer in self._sizes if made == generation}

    def holds(self, generation: int, buffers: Iterable[int]) -> bool:
        """Whether all of `buffers` are there."""
        return all((generation, buffer) in self._sizes for buffer in buffers)

    def check(self, handle: Handle, generation: int) -> None:
        """Refuse, with a HandleError, what is not a tensor in a live buffer of the current generation."""
        if handle.worker != self.worker:
            raise HandleError("worker", handle.worker, f"{self.worker}, whose memory is asked for")
        if handle.generation != generation:
            now = f"{generation}, which {self.worker} is in; what older ones had is gone"
            raise HandleError("generation", handle.generation, now)
        size = self._sizes.get((generation, handle.id))
        if size is None:
            why = self._freed.get((generation, handle.id), "it was never allocated, or freed long ago")
            raise HandleError("id", handle.id, f"a buffer that {self.worker} has; {why}")
        item = handle.dtype.itemsize
        if handle.offset < 0 or handle.offset % item:
            raise HandleError("offset", handle.offset, f"a multiple of {item} bytes, at least 0")
        if handle.nbytes <= 0 or handle.offset + handle.nbytes > size:
            room = f"{size - handle.offset} bytes, which buffer {handle.id} has from {handle.offset} on"
            raise HandleError("shape", handle.shape, f"between 1 and {room}")


def nbytes_of(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the bytes of a dense tensor."""
    return math.prod(shape) * dtype.itemsize


def check_size(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the bytes of a tensor that is to be allocated; a HandleError where they aren't positive."""
    whole = all(isinstance(size, int) and not isinstance(size, bool) for size in shape)
    if not whole or any(size <= 0 for size in shape) or nbytes_of(shape, dtype) > _MOST_BYTES:
        raise HandleError("shape", tuple(shape), f"positive sizes, of {_MOST_BYTES} bytes at most")
    return nbytes_of(shape, dtype)


def check_bits(tensor: torch.Tensor, name: str) -> None:
    """Refuse, with a HandleError, a tensor whose memory does not hold its values as they are."""
    if tensor.is_conj() or tensor.is_neg():
        raise HandleError(name, "a lazy conjugate or negative", "one whose values are in memory: resolve it")


def check_host(tensor: torch.Tensor, handle: Handle) -> None:
    """Refuse, with a HandleError, a tensor that can't be the other side of a copy."""
    if tensor.device.type != "cpu":
        raise HandleError("device", str(tensor.device), "cpu, for what is copied to or from a worker")
    if not tensor.is_contiguous():
        raise HandleError("strides", tensor.stride(), "those of a contiguous tensor")
    if tensor.dtype != handle.dtype:
        raise HandleError("dtype", tensor.dtype, f"the handle's, {handle.dtype}")
    if tuple(tensor.shape) != handle.shape:
        raise HandleError("shape", tuple(tensor.shape), f"the handle's, {handle.shape}")
    check_bits(tensor, "tensor")
