"""What is written down of a failure, and of a move from one device to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from piecework.errors import DeviceError

Stage = Literal["compile", "create", "run", "audit", "asked"]
"""Where a device may fail: making its model, making an execution context of it, running that, its results;
or an operator `asked` for another one.
"""


@dataclass(frozen=True)
class Failure:
    """A device that failed at `stage`; `kind` is the name of the error's class, `reason` its text."""

    device: str
    stage: Stage
    kind: str
    reason: str

    @classmethod
    def of(cls, device: str, stage: Stage, error: BaseException) -> Failure:
        """Write down an error, as one line."""
        text = error.reason if isinstance(error, DeviceError) else str(error)
        return cls(device, stage, type(error).__name__, " ".join(text.split()))

    def __str__(self) -> str:
        return f"{self.device} at {self.stage} ({self.kind}: {self.reason})"


@dataclass(frozen=True)
class Event:
    """A move: `source` failed, and `target` was made in its place, which took `seconds`, with
    letting go of what was there before.

    `at` is the time of the failure in seconds since the epoch. `done`: the target works; without it the
    next event says how that one failed, or there was no device left.
    """

    at: float
    source: str
    target: str
    stage: Stage
    kind: str
    reason: str
    seconds: float
    done: bool = True

    def as_dict(self) -> dict[str, Any]:
        """Return it for people and for JSON, with `from` and `to`."""
        return {
            "at": round(self.at, 3),
            "from": self.source,
            "to": self.target,
            "stage": self.stage,
            "kind": self.kind,
            "reason": self.reason,
            "seconds": round(self.seconds, 3),
            "done": self.done,
        }
