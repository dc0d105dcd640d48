"""Planned faults on any device, to see what a failure does: the setting `inject_fault`.

    point=run,device=0,step=7,kind=error; point=compile,device=1

Parts are separated by commas, faults by semicolons.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

from torch import Tensor

from piecework.devices.base import Device, Launchable
from piecework.devices.sim.faults import spoil, strike
from piecework.errors import ConfigError

log = logging.getLogger("piecework.devices")
FIELD = "inject_fault"
_POINTS = ("compile", "run")
_KINDS = ("error", "hang", "abort", "nan")


@dataclass(frozen=True)
class PlannedFault:
    """One fault. Numbers count from 0.

    Attributes:
        point: `compile`, of the distinct piece number `piece`, by default 0; or `run`.
        device: a place in the list of devices.
        kind: `error`; `hang` for good; `abort` of the process; `nan` in a run's results.
        step: of a run. piece: within the step, by default all of it.
    """

    point: str
    device: int = 0
    kind: str = "error"
    step: int = 0
    piece: int | None = None


def read_faults(text: str | None, devices: int) -> list[PlannedFault]:
    """Read the setting; raises ConfigError for what can't happen on so many devices."""
    return [_read(part, devices) for part in (text or "").split(";") if part.strip()]


def _read(text: str, devices: int) -> PlannedFault:
    parts = [part.strip() for part in text.split(",")]
    given = dict(part.split("=", 1) for part in parts if part.count("=") == 1)
    if len(given) < len(parts) or not set(given) <= {"point", "device", "kind", "step", "piece"}:
        raise ConfigError(FIELD, text, "point=...,device=N,step=N,piece=N,kind=..., each at most once")
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
    if point == "compile" and (kind == "nan" or "step" in numbers):
        raise ConfigError(FIELD, text, "a compile without step and without nan, since nothing runs then")
    if numbers.get("device", 0) >= devices:
        raise ConfigError(FIELD, text, f"a device below {devices}, a place in the list of devices")
    return PlannedFault(point, kind=kind, **numbers)


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
        """Let `faults` happen. One inside a step needs a step that goes piece by piece."""
        self.planned = tuple(faults)
        self._never = threading.Event()
        self._step, self._piece = -1, 0
        self._due: list[str] = []
        if any(fault.point == "run" and fault.piece is not None for fault in faults):
            log.info("%s runs piece by piece, without graphs, since one has a planned fault", self.name)
            self.captures = self.chains = False

    def notify(
        self,
        point: Literal["compile", "capture", "step", "piece", "done"],
        index: int,
        tensors: Sequence[Tensor] = (),
    ) -> None:
        """Let what is planned for a whole step, for a compile, or for the piece that was launched, happen."""
        super().notify(point, index, tensors)
        if point == "step":
            self._step, self._piece = index, 0
        if point == "piece":
            for kind in self._due:
                strike(kind, self.name, "piece", self._piece - 1, self._never)
        for fault in self.planned:
            if point == "compile" and fault.point == "compile" and (fault.piece or 0) == index:
                strike(fault.kind, self.name, "compile", index, self._never)
            if fault.point != "run" or fault.piece is not None or fault.step != index:
                continue
            if point == "step":
                strike(fault.kind, self.name, "step", index, self._never)
            elif point == "done":
                spoil(fault.kind, tensors)

    def launch(
        self, piece: Launchable, inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None = None
    ) -> Sequence[Tensor]:
        """Run a piece, with what is planned for it."""
        place = ("run", self._step, self._piece)
        due = [fault.kind for fault in self.planned if (fault.point, fault.step, fault.piece) == place]
        self._piece += 1
        self._due = due
        if not getattr(piece, "announces", False):  # one that can move says itself where it runs
            self.notify("piece", self._piece - 1)
        results = super().launch(piece, inputs, outputs)
        for kind in due:
            spoil(kind, results)
        return results


def with_faults(kind: type[Device], options: str, faults: Sequence[PlannedFault]) -> Device:
    """Make a device of `kind` on which `faults` happen."""
    made = type(f"Faulty{kind.__name__}", (FaultyDevice, kind), {"__module__": kind.__module__})
    device = cast("type[FaultyDevice]", made).from_options(options)
    assert isinstance(device, FaultyDevice)
    device.plan(faults)
    return device
