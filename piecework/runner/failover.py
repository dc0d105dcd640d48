"""The runner in use, and how the next device's takes over from it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from piecework.config import EngineConfig
from piecework.devices import Device, make_device
from piecework.devices.injected import read_faults
from piecework.devices.registry import device_class
from piecework.errors import EngineDeadError, RequestError
from piecework.failsafe.audit import AuditMissError
from piecework.failsafe.errors import is_device_error, loses_memory
from piecework.failsafe.events import Event, Stage
from piecework.failsafe.failover import Failover
from piecework.failsafe.policy import Policy
from piecework.profile import Profile, now
from piecework.runner.fitting import fit_cache, fit_settings
from piecework.runner.forecast import Forecast, forecast
from piecework.runner.load import Loaded, load
from piecework.runner.ranks import Ranks
from piecework.runner.reference import load_reference
from piecework.runner.spare import Spares
from piecework.runner.standby import Standby

log = logging.getLogger("piecework.failsafe")
LoadOn = Callable[[EngineConfig, Profile, str, tuple[str, str] | None], Loaded]
"""load_on(config, profile, name, settled) loads on one device, see the function of that name."""


class Runners:
    """Loads the model on the first device of `config.device` that can, and on the next when that fails.

    With one device, or the policy `off`, errors are what they were.
    """

    def __init__(self, config: EngineConfig, profile: Profile, load_by: LoadOn | None = None) -> None:
        """Load, with `load_by` if it is given.

        Raises what `load` raises, and ExhaustedError where several devices failed.

        Raises:
            ConfigError: a device of an unknown kind, anywhere in the list or as a reference, or a fault that
                can't happen.
        """
        self._config = config
        self._profile = profile
        self._load_on: LoadOn = load_by or load_on
        self._settled: tuple[str, str] | None = None
        devices = config.device.devices
        reference = config.audit.audit_device
        for name in (*devices, *((reference,) if reference else ())):
            device_class(name.partition(":")[0], name)
        read_faults(config.device.inject_fault, len(devices))
        policy = Policy(config.device.failover)  # type: ignore[arg-type]
        self._only: Loaded | None = None
        self._only_name = devices[0]
        self._by_hand: tuple[Event, ...] = ()  # and by audits; the failover has its own
        self._on_reference = False
        self._failover: Failover[Loaded] | None = None
        self._standby: Standby | None = None
        self._retired: list[Loaded] = []
        self._at_rest = False  # whether that is over which follows a start or a takeover
        self._stopped = False
        if len(devices) == 1 or policy.failover == "off":
            self._only = self._load(devices[0])
        else:
            self._failover = Failover(devices, self._load, policy, retire=self._retire, moves_by_hand=True)
        self.reference = self._load_reference() if config.audit.audit_device is not None else None
        if self._failover is not None and config.device.standby == "warm":
            self._standby = Standby(self._load_anew, self.forecast)
            self._refuse_what_does_not_fit()

    @property
    def loaded(self) -> Loaded:
        """What is in use; engine's thread only, since a move empties it first."""
        if self._on_reference:
            assert self.reference is not None
            return self.reference
        if self._failover is not None:
            return self._failover.active.model
        assert self._only is not None
        return self._only

    @property
    def active_device(self) -> str:
        """The device in use, as the settings call it; never waits."""
        if self._on_reference:
            return str(self._config.audit.audit_device)
        return self._failover.active.device if self._failover else self._only_name

    @property
    def events(self) -> tuple[Event, ...]:
        """All moves, in order."""
        failed = self._failover.events if self._failover else ()
        return tuple(sorted((*failed, *self._by_hand), key=lambda event: event.at))

    @property
    def degraded(self) -> bool:
        """True where not the first device is in use, since that failed or another was asked for."""
        moving = self._failover is not None and self._failover.is_moving
        return moving or self._on_reference or self.active_device != self._config.device.first

    @property
    def can_move(self) -> bool:
        """True where another device would go on if this one failed now."""
        failover = None if self._on_reference else self._failover
        return failover is not None and failover.policy.failover == "full" and not failover.is_at_last_device

    @property
    def gone(self) -> bool:
        """True where a device was given up, and none could take over."""
        return self._failover is not None and self._failover.is_gone

    def doubt(self, error: Exception | None = None) -> str | None:
        """Say why the cache in use must not go on elsewhere, after `error` or by hand; None where it may.

        What an audit is there to check is never believed without one.
        """
        if self.reference is not None and not self._on_reference:
            return "its numbers are audited"
        if error is None:
            return None
        return f"the device is lost ({type(error).__name__})" if loses_memory(error) else None

    def moves(self, error: Exception) -> bool:
        """True where another device would go on after `error` in a step."""
        audited = isinstance(error, AuditMissError)
        return audited or (self.can_move and is_device_error(error, "run"))

    def successor(self, error: Exception) -> Loaded | None:
        """Load on the next device where `error` is a failure of this one, else return None.

        Raises:
            ExhaustedError: there is none, or none that can.
        """
        if isinstance(error, AuditMissError):
            return self._take_reference(error)
        if self._on_reference or self._failover is None or not self._failover.policy.moves(error, "run"):
            return None
        self._at_rest = False
        return self._failover.advance(self._failover.active.generation, "run", error).model

    @property
    def standby(self) -> dict[str, Any] | None:
        """The warm standby as it is now, see Standby.as_dict; None where there is none."""
        return self._standby.as_dict() if self._standby else None

    @property
    def standby_events(self) -> tuple[dict[str, Any], ...]:
        """What became of standbys, in order."""
        return self._standby.events if self._standby else ()

    def forecast(self, name: str) -> Forecast | None:
        """Say what a standby on the device `name` will take of memory; None where that can't be known.

        Raises ConfigError where it does not fit.
        """
        return forecast(self._config, self.loaded, name)

    def settle(self, waiting: bool = False) -> None:
        """After a start, or when a takeover is over: let the old device go, make the next one ready.

        Does nothing while requests are `waiting` for their next token after a takeover, nor a second time.
        """
        if waiting or self._at_rest:
            return
        self._at_rest = True
        while self._retired:
            _close(self._retired.pop())
        if self._standby is not None:
            self._standby.start(self._behind())

    def stop(self) -> None:
        """Load nothing any more, here or in the background."""
        self._stopped = True
        if self._standby is not None:
            self._standby.stop()

    def close(self) -> None:
        """End what is made or kept in the background."""
        if self._standby is not None:
            self._standby.close()
        while self._retired:
            _close(self._retired.pop())

    def _refuse_what_does_not_fit(self) -> None:
        behind = self._behind()
        try:
            if behind:
                self.forecast(behind[0])
        except BaseException:
            _close(self.loaded)
            if self.reference is not None:
                _close(self.reference)
            raise

    def _behind(self) -> tuple[str, ...]:
        """The devices after the one in use; none takes over from the reference of an audit."""
        if self._on_reference:
            return ()
        devices = self._config.device.devices
        return devices[devices.index(self.active_device) + 1 :]

    def _retire(self, loaded: Loaded) -> None:
        """Take back what a device held: later where the next one stands by, which needs none of its room."""
        following = self._behind()
        if self._standby is not None and following and self._standby.is_warm(following[0]):
            self._retired.append(loaded)
        else:
            _close(loaded)

    def check(self, name: str) -> None:
        """Raise RequestError where `name` is no device that can be moved to."""
        devices = self._config.device.devices
        if name not in devices:
            message = f"device={name!r} is not allowed: one of {', '.join(devices)}, as it was started with"
            raise RequestError(message, param="device", code="unknown_device")

    def in_use(self, name: str) -> bool:
        """True where `name` is in use as a device of the list, not as the reference of an audit."""
        return name == self.active_device and not self._on_reference

    def move_to(self, name: str) -> Loaded | None:
        """Load on a device of the list that an operator asks for, and let go of the one in use.

        Returns None where that is in use already. Raises what `load` raises; all stays as it is then.
        """
        self.check(name)
        if self.in_use(name):
            return None
        began, source, self._at_rest = now(), self.active_device, False
        if self._failover is not None:
            self._failover.move_to(self._failover.devices.index(name))
        else:
            assert self._only is not None
            new, old = self._load(name), self._only
            self._only, self._only_name = new, name
            _close(old)
        self._on_reference = False  # which audits again
        self._note(source, name, "asked", "Operator", f"{name} was asked for", now() - began)
        return self.loaded

    def _take_reference(self, miss: AuditMissError) -> Loaded:
        """Go on with the reference, for good."""
        assert self.reference is not None, "there is one where something is audited"
        old, source = self.loaded, self.active_device
        self._on_reference, self._at_rest = True, False
        _close(old)
        self._note(source, self.active_device, "audit", type(miss).__name__, miss.reason, 0.0)
        self.reference.runner.profile = self._profile
        return self.reference

    def _note(self, source: str, target: str, stage: Stage, kind: str, reason: str, seconds: float) -> None:
        event = Event(time.time() - seconds, source, target, stage, kind, reason, seconds)
        self._by_hand = (*self._by_hand, event)

    def _load_reference(self) -> Loaded:
        loaded = self.loaded
        try:
            return load_reference(self._config, self._load_on, (loaded.dtype, loaded.quantization))
        except BaseException:
            _close(loaded)
            raise

    def _load(self, name: str) -> Loaded:
        standby = self._standby.take(name) if self._standby else None
        return standby or self._load_anew(name)

    def _load_anew(self, name: str) -> Loaded:
        if self._stopped:
            raise EngineDeadError("it is shutting down")
        loaded = self._load_on(self._config, self._profile, name, self._settled)
        self._settled = self._settled or (loaded.dtype, loaded.quantization)
        return loaded


def load_on(
    config: EngineConfig,
    profile: Profile,
    name: str,
    settled: tuple[str, str] | None = None,
    *,
    with_tokenizer: bool = True,
    ranks: Ranks | None = None,
) -> Loaded:
    """Load on the device `name` of `config.device`; those behind it are there for pieces that fail.

    `settled` are precision and quantisation of the device before it. `ranks`: the group in
    which this process is one. Raises what `load` raises.
    """
    names = config.device.devices
    faults = read_faults(config.device.inject_fault, len(names))

    def make(name: str) -> Device:
        return make_device(name, [fault for fault in faults if fault.device == names.index(name)])

    place = names.index(name)
    device, spares = make(name), Spares(names[place + 1 :], make)
    load_settings = config.load
    if settled is not None:  # the same weights and precision give the same tokens
        dtype, quantization = settled
        if not device.supports_dtype(getattr(torch, dtype)):
            log.warning("%s doesn't run in %s as the device before did; tokens may differ", name, dtype)
            dtype = load_settings.dtype
        load_settings = replace(load_settings, dtype=dtype, quantization=quantization)
    config = replace(config, device=config.device.alone(name), load=load_settings)
    if place > 0:
        settings, said = fit_settings(config.compilation_config, device)
        cache, more = fit_cache(config.cache, device, strict=settings.strict)
        config, said = replace(config, compilation_config=settings, cache=cache), [*said, *more]
        if config.device.place is not None:  # which was written with the first device in mind
            config = replace(config, device=replace(config.device, place=None))
            said.append("place")
        if said:
            log.warning("%s runs without what it doesn't have: %s", name, ", ".join(said))
    return load(config, profile, device, spares, with_tokenizer=with_tokenizer, ranks=ranks)


def _close(loaded: Loaded) -> None:
    loaded.runner.close()
