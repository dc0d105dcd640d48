"""A captured graph of `sim`: launches on recorded addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from piecework.devices.captured import CapturedGraph, HostUpdate
from piecework.devices.sim.memory import SimMemory
from piecework.devices.sim.ranges import Range
from piecework.errors import CaptureError


@dataclass
class Launch:
    """One recorded operation: what is called, on which addresses, and where its results go.

    `results` has an entry per tensor that `fn` returns; None where that lies at its address already (a
    view, or an argument that was written). `host` are the host arguments by name. `poison` are the ranges
    that became free in the pool since the launch before.
    """

    name: str
    fn: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    results: list[Tensor | None]
    host: dict[str, int | str] = field(default_factory=dict)
    poison: tuple[Range, ...] = ()

    def run(self) -> None:
        """Call the operation and copy its results to their recorded addresses."""
        returned = tensors_of(self.fn(*self.args, **self.kwargs))
        for result, target in zip(returned, self.results, strict=True):
            if target is not None:
                target.copy_(result)


def tensors_of(returned: Any) -> list[Tensor]:
    """Flatten what an operation returns: nothing, a tensor, or a sequence of tensors."""
    if returned is None:
        return []
    if isinstance(returned, Tensor):
        return [returned]
    return list(returned)


class SimGraph(CapturedGraph):
    """Recorded launches. A replay calls their operations and nothing else: no module, no model code."""

    def __init__(
        self,
        memory: SimMemory,
        launches: Sequence[Launch],
        free_at_start: tuple[Range, ...],
        overhead: Tensor,
        released: Callable[[], None],
    ) -> None:
        self._memory = memory
        self._launches = list(launches)
        self._free_at_start = free_at_start
        self._overhead: Tensor | None = overhead  # what the graph itself takes of the device's memory
        self._released = released

    @property
    def operations(self) -> list[str]:
        """Names of the recorded operations, in order."""
        return [launch.name for launch in self._launches]

    @torch.inference_mode()
    def replay(self) -> None:
        """Run all launches; ranges that were free at that point of the capture hold NaN before each."""
        if self._overhead is None:
            raise CaptureError("a released graph can't be replayed")
        self._memory.settle()
        self._memory.poison(self._free_at_start)
        for launch in self._launches:
            self._memory.poison(launch.poison)
            launch.run()

    def update(self, values: Mapping[str, Tensor]) -> HostUpdate:
        """Stage new host arguments; a replay before `join` still sees the old ones."""
        known = {name for launch in self._launches for name in launch.host}
        for name in values:
            if name not in known:
                allowed = ", ".join(sorted(known)) or "none"
                raise CaptureError(f"{name} is no host argument of this graph; it has: {allowed}")
        return _Update(self._staged(values))

    def _staged(self, values: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        return [(old, new) for launch in self._launches for old, new in _pairs(launch, values)]

    def release(self) -> None:
        """Forget the launches and give the graph's place in the budget back."""
        if self._overhead is not None:
            self._overhead = None
            self._launches.clear()
            self._released()

    def __del__(self) -> None:
        self.release()


def _pairs(launch: Launch, values: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    for name, place in launch.host.items():
        if name in values:
            old = launch.kwargs[place] if isinstance(place, str) else launch.args[place]
            if old.shape != values[name].shape or old.dtype != values[name].dtype:
                raise CaptureError(
                    f"{name} was captured as {old.dtype} {list(old.shape)}, "
                    f"not as {values[name].dtype} {list(values[name].shape)}"
                )
            yield old, values[name].clone()


class _Update(HostUpdate):
    def __init__(self, staged: list[tuple[Tensor, Tensor]]) -> None:
        self._staged = staged

    def join(self) -> None:
        """Write the staged values into the launches."""
        for old, new in self._staged:
            old.copy_(new)
        self._staged = []
