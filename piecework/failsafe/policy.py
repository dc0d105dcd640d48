"""When a failure moves work to the next device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from piecework.errors import ConfigError
from piecework.failsafe.errors import is_device_error
from piecework.failsafe.events import Stage

Switch = Literal["off", "compile", "full"]


@dataclass(frozen=True)
class Policy:
    """What fail-safe execution may do.

    Attributes:
        failover: `off`: the first error is final. `compile`: only what is being made moves, a model or an
            execution context. `full`: a run moves, too.
        snapshot: copy the inputs that a run writes in place before every run, so that it can be repeated;
            without it such a run isn't.
    """

    failover: Switch = "full"
    snapshot: bool = False

    def __post_init__(self) -> None:
        if self.failover not in get_args(Switch):
            raise ConfigError("failover", self.failover, "one of " + ", ".join(get_args(Switch)))

    def moves(self, error: BaseException, stage: Stage) -> bool:
        """Say whether `error` at `stage` is for the next device."""
        allowed = self.failover == "full" or (self.failover == "compile" and stage != "run")
        return allowed and is_device_error(error, stage)
