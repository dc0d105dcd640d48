"""What fail-safe models and runners share: which device is active, and how the next one becomes so."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from piecework.errors import ConfigError, DeviceError
from piecework.failsafe.errors import ExhaustedError, let_go
from piecework.failsafe.events import Event, Failure, Stage
from piecework.failsafe.policy import Policy
from piecework.profile import now

log = logging.getLogger("piecework.failsafe")
M = TypeVar("M")
Factory = Callable[[str], M | None]
"""factory(device) makes the model on a device; everything else that it needs is settled when it is made."""


@dataclass(frozen=True)
class Active(Generic[M]):
    """A device in use: its place in the list, its model, and how many moves came before it."""

    index: int
    device: str
    model: M
    generation: int


class Failover(Generic[M]):
    """Makes a model on the first device of a list that can, and on a later one when that fails.

    It only ever moves forward. Safe from many threads: those that report the same failure move once, and
    nobody who reads what is active waits for a move.
    """

    def __init__(
        self,
        devices: Sequence[str],
        factory: Factory[M],
        policy: Policy,
        retire: Callable[[M], None] | None = None,
        what: str = "",
        moves_by_hand: bool = False,
    ) -> None:
        """Make the first model.

        Args:
            retire: takes back a model that failed, before the next is made.
            what: names the model in the log.
            moves_by_hand: `move_to` will be asked, so that the factory is kept on the last device too.

        Raises:
            ConfigError: no device.
            ExhaustedError: no device could make it, the first cause chained. An error of the first device
                that is none of the device's (see Policy.moves) is raised as it is.
        """
        if not devices:
            raise ConfigError("devices", list(devices), "at least one device")
        self.devices = tuple(devices)
        self.policy = policy
        self._factory: Factory[M] | None = factory
        self._retire = retire
        self._what = f"{what}: " if what else ""
        self._moves_by_hand = moves_by_hand
        self._changed = threading.Condition()
        self._moving = self._gone = False
        self._tried = -1  # the last device that a model was asked of
        self._failures: dict[int, Failure] = {}
        self._first_cause: Exception | None = None
        self._events: tuple[Event, ...] = ()
        self._active = self._make(generation=0)
        self._release_source()

    @property
    def active(self) -> Active[M]:
        """The device in use; during a move still the one that failed."""
        return self._active

    @property
    def is_at_last_device(self) -> bool:
        """True where there is no device to move to any more."""
        return self._tried == len(self.devices) - 1

    @property
    def is_gone(self) -> bool:
        """True where a model was retired and no other could be made."""
        return self._gone

    @property
    def is_moving(self) -> bool:
        """True while the next model is made."""
        return self._moving

    @property
    def events(self) -> tuple[Event, ...]:
        """All moves, in order."""
        return self._events

    def advance(self, generation: int, stage: Stage, error: Exception) -> Active[M]:
        """Report that the device of `generation` failed; returns what is active instead, maybe already was.

        Where another thread makes the next model at this moment, waits for it.

        Raises:
            ExhaustedError: no device is left. What is active stays so, unless it was retired: the last
                device gets another chance at the next run.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._moving)
            if self._active.generation != generation:
                return self._active
            self._note(self._active.index, stage, error)
            if self.is_at_last_device:
                raise self._exhausted()
            self._moving = True
        began = now()
        # Without the lock: this takes long, and readers must not wait.
        try:
            if self._retire is not None:
                self._gone = True
                self._retire(self._active.model)
            made = self._make(generation + 1, began)
            with self._changed:
                self._active, self._gone = made, False
                self._release_source()
            return made
        finally:
            with self._changed:
                self._moving = False
                self._changed.notify_all()

    def move_to(self, index: int) -> Active[M]:
        """Use a device that somebody chose, maybe one that failed before, from now on.

        Where it fails, the devices behind it come next. The model before is let go once there is the new one:
        where that can't be made, the error is raised and all stays as it is. No event tells of this.
        """
        assert self._moves_by_hand and self._factory is not None
        with self._changed:
            self._changed.wait_for(lambda: not self._moving)
            self._moving = True
        old, device = self._active, self.devices[index]
        try:
            model = self._factory(device)
            if model is None:
                raise DeviceError(device, "compile", "the factory made nothing")
            with self._changed:
                self._active, self._gone = Active(index, device, model, old.generation + 1), False
                self._tried, self._failures, self._first_cause = index, {}, None
        finally:
            with self._changed:
                self._moving = False
                self._changed.notify_all()
        if self._retire is not None:
            self._retire(old.model)
        return self._active

    def _make(self, generation: int, since: float | None = None) -> Active[M]:
        """Make a model on the next device that can; `since` is when the last one was known to fail."""
        assert self._factory is not None
        first = self._tried + 1
        for index in range(first, len(self.devices)):
            source, self._tried = self._tried, index
            device, began, since = self.devices[index], since or now(), None
            try:
                model = self._factory(device)
                if model is None:
                    raise DeviceError(device, "compile", "the factory made nothing")
            except Exception as error:
                # The settings were written with the first device in mind; a later one that they don't fit
                # is one that can't take over.
                if index == 0 and not self.policy.moves(error, "compile"):
                    raise
                self._note(index, "compile", error)
                self._tell(source, device, now() - began, done=False)
            else:
                self._tell(source, device, now() - began, done=True)
                return Active(index, device, model, generation)
        self._release_source()
        raise self._exhausted()

    def _note(self, index: int, stage: Stage, error: Exception) -> None:
        let_go(error)
        self._failures[index] = Failure.of(self.devices[index], stage, error)
        self._first_cause = self._first_cause or error

    def _exhausted(self) -> ExhaustedError:
        exhausted = ExhaustedError([failure for _, failure in sorted(self._failures.items())])
        exhausted.__cause__ = self._first_cause
        return exhausted

    def _tell(self, source: int, target: str, seconds: float, done: bool) -> None:
        if source not in self._failures:
            return  # the first device of all
        why = self._failures[source]
        event = Event(
            time.time() - seconds, why.device, target, why.stage, why.kind, why.reason, seconds, done
        )
        self._events = (*self._events, event)
        then = (
            f"{target} took over after {seconds:.2f} s" if done else f"{target} was to take over, and failed"
        )
        log.warning(
            "%sthe device %s failed at %s: %s; %s", self._what, why.device, why.stage, why.reason, then
        )

    def _release_source(self) -> None:
        """Let go of the factory, and with it the source graph, where nothing will be made any more."""
        if self.is_at_last_device and not self._moves_by_hand:
            self._factory = None
