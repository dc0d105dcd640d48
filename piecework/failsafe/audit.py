"""The audit: how far a device's numbers are from those of a reference, and what follows from that."""

from __future__ import annotations

import logging
import math
import threading
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from piecework.errors import DeviceError

log = logging.getLogger("piecework.failsafe")
Result = Literal["good", "missed", "skipped"]
_NOTES = 8


class AuditMissError(DeviceError):
    """A device gave other numbers than the reference; `error` is their NRMSE."""

    def __init__(self, device: str, reference: str, error: float, threshold: float) -> None:
        self.error = error
        text = f"its results differ from those of {reference}: NRMSE {error:.3g}, over {threshold:g}"
        super().__init__(device, "run", text)


@dataclass(frozen=True)
class AuditPolicy:
    """What is audited, and what a miss does.

    Attributes:
        every: audit the first run and then each `every`-th.
        threshold: the largest NRMSE that passes.
        switch: go on with the reference for good after a miss; without it there is a warning only.
    """

    every: int = 16
    threshold: float = 0.05
    switch: bool = True


@dataclass(frozen=True)
class AuditReport:
    """What audits found: how often each result, the last NRMSE and the greatest, None before the first."""

    reference: str
    good: int = 0
    missed: int = 0
    skipped: int = 0
    last: float | None = None
    greatest: float | None = None


class Audit:
    """Counts runs and judges those that are audited. Safe from many threads.

    `ended` says why nothing is audited any more; None while something is. `notes` are what was found and
    changed nothing, the latest ones.
    """

    def __init__(self, policy: AuditPolicy, reference: str) -> None:
        self.policy = policy
        self.reference = reference
        self.ended: str | None = None
        self.notes: tuple[str, ...] = ()
        self._lock = threading.Lock()
        self._since = policy.every - 1  # the first one is audited: nothing wrong shall be said at all
        self._report = AuditReport(reference)

    def due(self) -> bool:
        """Count a run; True where it is to be audited."""
        with self._lock:
            self._since += 1
            if self.ended is not None or self._since < self.policy.every:
                return False
            self._since = 0
            return True

    def again(self) -> None:
        """Audit the next run: the first one of another device, or one after a run that failed."""
        with self._lock:
            self._since = self.policy.every - 1

    def end(self, why: str) -> None:
        """Audit nothing any more."""
        with self._lock:
            self.ended = self.ended or why
            self.notes = (*self.notes, why)[-_NOTES:]

    def skip(self) -> None:
        """Note that the reference could not compute a run."""
        self._note("skipped")

    def judge(self, device: str, error: float) -> AuditMissError | None:
        """Note the NRMSE of a run; returns the miss where it is one. A NaN is."""
        if error <= self.policy.threshold:
            self._note("good", error)
            return None
        miss = AuditMissError(device, self.reference, error, self.policy.threshold)
        first = self._note("missed", error) == 1
        then = f"{self.reference} goes on" if self.policy.switch else "it goes on (audit_policy=warn)"
        level = logging.WARNING if first or self.policy.switch else logging.INFO
        log.log(level, "the device %s failed its audit: %s; %s", device, miss.reason, then)
        if not self.policy.switch:
            with self._lock:
                self.notes = (*self.notes, f"{device}: {miss.reason}")[-_NOTES:]
        return miss

    def report(self) -> AuditReport:
        """Return the counts so far."""
        return self._report

    def _note(self, result: Result, error: float | None = None) -> int:
        with self._lock:
            counts = {name: getattr(self._report, name) for name in ("good", "missed", "skipped")}
            counts[result] += 1
            last, greatest = self._report.last, self._report.greatest
            if error is not None:
                last, greatest = error, _greater(greatest, error)
            self._report = AuditReport(self.reference, **counts, last=last, greatest=greatest)
            return int(counts[result])


def nrmse(measured: Tensor, reference: Tensor) -> float:
    """Return the normalised root mean square error of the worst row of two tensors [..., V].

    A row's error is divided by the larger of the two rows' ranges, max - min (by the larger magnitude where
    both are constant). NaN where any value is NaN or infinite; infinite where the shapes differ.
    """
    if measured.shape != reference.shape:
        return math.inf
    if not measured.numel():
        return 0.0
    width = measured.shape[-1] if measured.dim() else 1
    a, b = (t.detach().reshape(-1, width).to("cpu", torch.float32) for t in (measured, reference))
    error = (a - b).square().mean(-1).sqrt()
    scale = torch.maximum(a.amax(-1) - a.amin(-1), b.amax(-1) - b.amin(-1))
    magnitude = torch.maximum(a.abs().amax(-1), b.abs().amax(-1))
    scale = torch.where(scale == 0, magnitude, scale)
    found = torch.where(error == 0, error, error / scale)
    return float(found.max())


def _greater(known: float | None, new: float) -> float:
    return new if known is None or math.isnan(new) or new > known else known
