"""What an orchestrator asks of a worker below it, wherever that worker lives."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import torch

Scalar = int | float | bool | str | bytes


@dataclass(frozen=True)
class Region:
    """A dense tensor inside a buffer of an endpoint: `offset` in bytes from the buffer's start."""

    buffer: int
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Endpoint(Protocol):
    """One worker: memory, copies and calls, in the order in which they are submitted.

    `name` says where it is (`sim:0`), `generation` counts its restarts: what was allocated in one
    generation is gone in the next. All methods return at once but `malloc` and `free`; a future fails
    with DeviceError when the worker dies or is silent beyond its deadline.
    """

    name: str
    generation: int

    def malloc(self, nbytes: int) -> int:
        """Allocate a buffer of `nbytes` > 0 bytes and return its id, unique in this generation."""
        ...

    def free(self, buffer: int) -> None:
        """Give a buffer back."""
        ...

    def copy_to(self, target: Region, source: torch.Tensor) -> Future[None]:
        """Copy a dense CPU tensor into the worker's memory; `source` is not changed before it is done."""
        ...

    def copy_from(self, source: Region, target: torch.Tensor) -> Future[None]:
        """Copy from the worker's memory into a dense CPU tensor."""
        ...

    def run(self, digest: str, arguments: Sequence[Scalar | Region]) -> Future[None]:
        """Call the registered function with this content digest; regions arrive as tensors."""
        ...

    def close(self, deadline: float) -> None:
        """End the worker within `deadline` seconds, whatever it does; a second call does nothing."""
        ...
