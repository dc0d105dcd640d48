"""Faults that a test plans: at which point, at which index, and what happens."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from piecework.errors import ConfigError, DeviceError, DeviceLostError

_POINTS = ("compile", "capture", "step")
_KINDS = ("error", "lost", "hang", "abort", "nan", "wrong")


@dataclass(frozen=True)
class Fault:
    """At number `index` of `point` (a distinct piece's compile, a capture, a step; from 0), do `kind`.

    `error` raises DeviceError, `lost` DeviceLostError; `hang` waits until `Faults.release`; `abort` ends the
    process as a crash in native code does; `nan` and `wrong` (every value off by one) spoil a step's results
    without a word.
    """

    point: str
    index: int
    kind: str = "error"

    def __post_init__(self) -> None:
        if self.point not in _POINTS:
            raise ConfigError("fault.point", self.point, "one of " + ", ".join(_POINTS))
        if self.kind not in _KINDS:
            raise ConfigError("fault.kind", self.kind, "one of " + ", ".join(_KINDS))
        if self.kind in ("nan", "wrong") and self.point != "step":
            raise ConfigError(
                "fault.kind", self.kind, "error, lost, hang or abort, since only a step has results"
            )


class Faults:
    """The planned faults of one device, each of which happens every time its point and index come up."""

    def __init__(self, plan: Sequence[Fault]) -> None:
        self._plan = {(fault.point, fault.index): fault.kind for fault in plan}
        self._released = threading.Event()

    def release(self) -> None:
        """End every hang, those to come too."""
        self._released.set()

    def before(self, device: str, point: str, index: int) -> None:
        """Do what is planned for the beginning of `point` number `index`."""
        strike(self._plan.get((point, index)), device, point, index, self._released)

    def after(self, index: int, results: Sequence[Tensor]) -> None:
        """Spoil the results of step `index` where that is planned."""
        spoil(self._plan.get(("step", index)), results)


def strike(kind: str | None, device: str, point: str, index: int, released: threading.Event) -> None:
    """Do what happens before there are results; a hang lasts until `released`."""
    if kind == "error":
        raise DeviceError(device, point, f"planned fault at {point} {index}")
    if kind == "lost":
        raise DeviceLostError(device, point, f"planned loss at {point} {index}")
    if kind == "hang":
        released.wait()
    if kind == "abort":
        os.abort()


def spoil(kind: str | None, results: Sequence[Tensor]) -> None:
    """Do what happens to results."""
    for tensor in results:
        if kind == "nan":
            tensor.fill_(float("nan"))
        elif kind == "wrong":
            tensor.add_(1)
