"""The runner in use, and how the next device's takes over from it."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from piecework.config import EngineConfig
from piecework.devices import Device, make_device
from piecework.devices.injected import read_faults
from piecework.devices.registry import device_class
from piecework.failsafe.events import Event
from piecework.failsafe.failover import Failover
from piecework.failsafe.policy import Policy
from piecework.profile import Profile
from piecework.runner.fitting import fit_cache, fit_settings
from piecework.runner.load import Loaded, load
from piecework.runner.spare import Spares

log = logging.getLogger("piecework.failsafe")


class Runners:
    """Loads the model on the first device of `config.device` that can, and on the next when that fails.

    With one device, or the policy `off`, errors are what they were.
    """

    def __init__(self, config: EngineConfig, profile: Profile) -> None:
        """Load; raises what `load` raises, and ExhaustedError where several devices failed.

        Raises:
            ConfigError: a device of an unknown kind, anywhere in the list, or a fault that can't happen.
        """
        self._config = config
        self._profile = profile
        self._settled: tuple[str, str] | None = None
        devices = config.device.devices
        for name in devices:
            device_class(name.partition(":")[0], name)
        self._faults = read_faults(config.device.inject_fault, len(devices))
        policy = Policy(config.device.failover)  # type: ignore[arg-type]
        self._only: Loaded | None = None
        self._failover: Failover[Loaded] | None = None
        if len(devices) == 1 or policy.failover == "off":
            self._only = self._load(devices[0])
        else:
            self._failover = Failover(devices, self._load, policy, retire=_close)

    @property
    def loaded(self) -> Loaded:
        """What is in use; engine's thread only, since a move empties it first."""
        if self._failover is not None:
            return self._failover.active.model
        assert self._only is not None
        return self._only

    @property
    def active_device(self) -> str:
        """The device in use, as the settings call it; never waits."""
        return self._failover.active.device if self._failover else self._config.device.devices[0]

    @property
    def events(self) -> tuple[Event, ...]:
        """All moves, in order."""
        return self._failover.events if self._failover else ()

    @property
    def degraded(self) -> bool:
        """True where a device failed."""
        return self._failover is not None and (self._failover.is_moving or bool(self._failover.events))

    @property
    def gone(self) -> bool:
        """True where a device was given up, and none could take over."""
        return self._failover is not None and self._failover.is_gone

    def successor(self, error: Exception) -> Loaded | None:
        """Load on the next device where `error` is a failure of this one, else return None.

        Raises:
            ExhaustedError: there is none, or none that can.
        """
        if self._failover is None or not self._failover.policy.moves(error, "run"):
            return None
        return self._failover.advance(self._failover.active.generation, "run", error).model

    def _load(self, name: str) -> Loaded:
        place = self._config.device.devices.index(name)
        device, spares = self._device(name), Spares(self._config.device.devices[place + 1 :], self._device)
        load_settings = self._config.load
        if self._settled is not None:  # the same weights and precision give the same tokens
            dtype, quantization = self._settled
            if not device.supports_dtype(getattr(torch, dtype)):
                log.warning("%s doesn't run in %s as the device before did; tokens may differ", name, dtype)
                dtype = load_settings.dtype
            load_settings = replace(load_settings, dtype=dtype, quantization=quantization)
        config = replace(self._config, device=replace(self._config.device, device=name), load=load_settings)
        if place > 0:
            settings, said = fit_settings(config.compilation_config, device)
            cache, more = fit_cache(config.cache, device, strict=settings.strict)
            config, said = replace(config, compilation_config=settings, cache=cache), [*said, *more]
            if said:
                log.warning("%s runs without what it doesn't have: %s", name, ", ".join(said))
        loaded = load(config, self._profile, device, spares)
        self._settled = self._settled or (loaded.dtype, loaded.quantization)
        return loaded

    def _device(self, name: str) -> Device:
        place = self._config.device.devices.index(name)
        return make_device(name, [fault for fault in self._faults if fault.device == place])


def _close(loaded: Loaded) -> None:
    loaded.runner.close()
