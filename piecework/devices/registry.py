"""Devices by name. Third parties add one through the entry-point group `piecework.devices`."""

from __future__ import annotations

from importlib.metadata import entry_points

from piecework.devices.base import Device
from piecework.devices.cpu import CpuDevice
from piecework.errors import ConfigError

GROUP = "piecework.devices"
_BUILT_IN: dict[str, type[Device]] = {"cpu": CpuDevice}


def known_devices() -> list[str]:
    """Return the names of all devices that are installed, sorted."""
    return sorted({*_BUILT_IN, *(entry.name for entry in entry_points(group=GROUP))})


def make_device(name: str) -> Device:
    """Make the device `name`; an unknown name is a ConfigError that lists the known ones."""
    if name in _BUILT_IN:
        return _BUILT_IN[name]()
    for entry in entry_points(group=GROUP):
        if entry.name == name:
            device = entry.load()()
            if not isinstance(device, Device):
                raise ConfigError("device", name, f"{entry.value} to be a piecework.devices.Device")
            return device
    raise ConfigError("device", name, "one of " + ", ".join(known_devices()))
