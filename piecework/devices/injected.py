"""Planned faults on any device, to see what a failure does: the setting `inject_fault`.

    point=run,device=0,step=7,kind=error; point=compile,device=1; point=run,step=7+,kind=wrong,where=row

Parts are separated by commas, faults by semicolons.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

from torch import Tensor

from piecework.devices.base import Device, Launchable
from piecework.devices.captured import CapturedGraph, HostUpdate
from piecework.devices.sim.faults import strike
from piecework.errors import ConfigError

log = logging.getLogger("piecework.devices")
FIELD = "inject_fault"
T = TypeVar("T")
_POINTS = ("compile", "run")
_NUMBERS = ("nan", "wrong")
_KINDS = ("error", "lost", "hang", "abort", *_NUMBERS)
_PLACES = ("results", "row", "cache", "replay")
_PARTS = ("point", "device", "step", "piece", "kind", "where")


@dataclass(frozen=True)
class PlannedFault:
    """One fault. Numbers count from 0.

    Attributes:
        point: `compile`, of the distinct piece number `piece`, by default 0; or `run`.
        device: a place in the list of devices.
        kind: `error`; `lost`, one after which memory can't be read; `hang` for good; `abort` of the process;
            in a run's numbers `nan`, or `wrong`: each row turned by one, so that its values are as plausible
            as before.
        step: of a run; `onwards`: each later one, too. piece: within the step, by default all of it.
        where: which numbers: the `results`, the last `row` of them, the KV `cache`, or the results of a step
            that was the `replay` of a captured graph.
    """

    point: str
    device: int = 0
    kind: str = "error"
    step: int = 0
    piece: int | None = None
    onwards: bool = False
    where: str = "results"

    def strikes(self, step: int) -> bool:
        """Whether it happens in a step."""
        return step == self.step or (self.onwards and step > self.step)


def read_faults(text: str | None, devices: int) -> list[PlannedFault]:
    """Read the setting; raises ConfigError for what can't happen on so many devices."""
    return [_read(part, devices) for part in (text or "").split(";") if part.strip()]


def _read(text: str, devices: int) -> PlannedFault:
    parts = [part.strip() for part in text.split(",")]
    given = dict(part.split("=", 1) for part in parts if part.count("=") == 1)
    if len(given) < len(parts) or not set(given) <= set(_PARTS):
        allowed = "point=...,device=N,step=N,piece=N,kind=...,where=..., each at most once"
        raise ConfigError(FIELD, text, allowed)
    onwards = given.get("step", "").endswith("+")
    given |= {"step": given["step"].removesuffix("+")} if onwards else {}
    numbers: dict[str, int] = {}
    for name in ("device", "step", "piece"):
        if name in given:
            if not given[name].isdecimal():
                raise ConfigError(FIELD, text, f"a whole number as {name}")
            numbers[name] = int(given[name])
    point, kind = given.get("point", ""), given.get("kind", "error")
    if point not in _POINTS:
        raise ConfigError(FIELD, text, "a point, one of " + ", ".join(_POINTS))
    if kind not in _KINDS:
        raise ConfigError(FIELD, text, "a kind, one of " + ", ".join(_KINDS))
    if point == "compile" and (kind in _NUMBERS or "step" in numbers):
        allowed = "a compile without step and without wrong numbers, since nothing runs then"
        raise ConfigError(FIELD, text, allowed)
    where = given.get("where", "results")
    if where not in _PLACES:
        raise ConfigError(FIELD, text, "a where, one of " + ", ".join(_PLACES))
    if where != "results" and (kind not in _NUMBERS or "piece" in numbers):
        raise ConfigError(FIELD, text, f"where={where} for kind=nan or kind=wrong, and without a piece")
    if numbers.get("device", 0) >= devices:
        raise ConfigError(FIELD, text, f"a device below {devices}, a place in the list of devices")
    return PlannedFault(point, kind=kind, onwards=onwards, where=where, **numbers)


class FaultyDevice(Device):
    """What a device's class gets in front of it so that planned faults happen; see `with_faults`.

    Steps are counted from the start of a runner, pieces from the start of a step: those of the model's body
    first, then the head's.
    """

    planned: tuple[PlannedFault, ...]

    @property
    def fails_to_compile(self) -> bool:
        """Whether a program that was kept on disk would hide a planned fault."""
        return any(fault.point == "compile" for fault in self.planned)

    def plan(self, faults: Sequence[PlannedFault]) -> None:
        """Let `faults` happen. One inside a step needs a step that goes piece by piece.

        Raises ConfigError for one in replays, of which this device has none.
        """
        self.planned = tuple(faults)
        self._never = threading.Event()
        self._step, self._piece = -1, 0
        self.replayed = False
        self.watches_cache = any(fault.where == "cache" for fault in faults)
        if not self.captures and any(fault.where == "replay" for fault in faults):
            raise ConfigError(FIELD, "where=replay", f"results, row or cache: {self.name} captures no graphs")
        self._due: list[str] = []
        if any(fault.point == "run" and fault.piece is not None for fault in faults):
            log.info("%s runs piece by piece, without graphs, since one has a planned fault", self.name)
            self.captures = self.chains = False

    def notify(
        self,
        point: Literal["compile", "capture", "step", "piece", "done", "cache"],
        index: int,
        tensors: Sequence[Tensor] = (),
    ) -> None:
        """Let what is planned for a whole step, for a compile, or for the piece that was launched, happen."""
        super().notify(point, index, tensors)
        if point == "step":
            self._step, self._piece, self.replayed = index, 0, False
        if point == "piece":
            for kind in self._due:
                strike(kind, self.name, "piece", self._piece - 1, self._never)
        for fault in self.planned:
            if point == "compile" and fault.point == "compile" and (fault.piece or 0) == index:
                strike(fault.kind, self.name, "compile", index, self._never)
            if fault.point != "run" or fault.piece is not None or not fault.strikes(self._step):
                continue
            if point == "step":
                strike(fault.kind, self.name, "step", index, self._never)
            elif point in ("done", "cache"):
                spoil(fault.kind, self._numbers(fault.where, point, tensors))

    def _numbers(self, where: str, point: str, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """What a fault spoils of a step's results (`done`; hidden states, then logits), or of its cache."""
        if (point == "cache") != (where == "cache") or (where == "replay" and not self.replayed):
            return ()
        return [tensor[-1:] for tensor in tensors[1:]] if where == "row" else tensors

    def capture(self, fn: Callable[[], T], pool: Any) -> tuple[CapturedGraph, T]:
        """Record what `fn` does; replays are noted where a fault is planned for them."""
        graph, made = super().capture(fn, pool)
        if any(fault.where == "replay" for fault in self.planned):
            graph = _NotedGraph(graph, self)
        return graph, made

    def launch(
        self, piece: Launchable, inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None = None
    ) -> Sequence[Tensor]:
        """Run a piece, with what is planned for it."""
        due = [
            fault.kind
            for fault in self.planned
            if (fault.point, fault.piece) == ("run", self._piece) and fault.strikes(self._step)
        ]
        self._piece += 1
        self._due = due
        if not getattr(piece, "announces", False):  # one that can move says itself where it runs
            self.notify("piece", self._piece - 1)
        results = super().launch(piece, inputs, outputs)
        for kind in due:
            spoil(kind, results)
        return results


class _NotedGraph(CapturedGraph):
    """A captured graph whose replays its device hears of."""

    def __init__(self, graph: CapturedGraph, device: FaultyDevice) -> None:
        self._graph = graph
        self._device = device

    def replay(self) -> None:
        self._device.replayed = True
        self._graph.replay()

    def release(self) -> None:
        self._graph.release()

    def update(self, values: Mapping[str, Tensor]) -> HostUpdate:
        return self._graph.update(values)


def spoil(kind: str, results: Sequence[Tensor]) -> None:
    """Do what happens to results. Integers, as in an int8 cache, have no NaN: their scales have."""
    for tensor in results:
        if kind == "nan" and tensor.is_floating_point():
            tensor.fill_(float("nan"))
        elif kind == "wrong":
            tensor.copy_(tensor.roll(1, -1))


def with_faults(kind: type[Device], options: str, faults: Sequence[PlannedFault]) -> Device:
    """Make a device of `kind` on which `faults` happen."""
    made = type(f"Faulty{kind.__name__}", (FaultyDevice, kind), {"__module__": kind.__module__})
    device = cast("type[FaultyDevice]", made).from_options(options)
    assert isinstance(device, FaultyDevice)
    device.plan(faults)
    return device
