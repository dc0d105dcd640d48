"""Devices by name. Third parties add one through the entry-point group `piecework.devices`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points

from piecework.devices.base import Device
from piecework.devices.cpu import CpuDevice
from piecework.devices.cuda import CudaDevice
from piecework.devices.injected import PlannedFault, with_faults
from piecework.devices.npu import NpuDevice
from piecework.devices.openvino import OpenVinoDevice
from piecework.devices.sim import SimDevice
from piecework.errors import ConfigError

GROUP = "piecework.devices"
_BUILT_IN: dict[str, type[Device]] = {
    "cpu": CpuDevice,
    "cuda": CudaDevice,
    "npu": NpuDevice,
    "openvino": OpenVinoDevice,
    "sim": SimDevice,
}


def known_devices() -> list[str]:
    """Return the names of all devices that are installed, sorted."""
    return sorted({*_BUILT_IN, *(entry.name for entry in entry_points(group=GROUP))})


def make_device(name: str, faults: Sequence[PlannedFault] = ()) -> Device:
    """Make the device `name`; what follows a colon goes to the device (`sim:host`).

    An unknown name is a ConfigError that lists the known ones. `faults` will happen on it.
    """
    kind, colon, options = name.partition(":")
    if colon and not options:
        raise ConfigError("device", name, f"a name without a colon, or with options behind it: {kind}")
    found = device_class(kind, name)
    return with_faults(found, options, faults) if faults else found.from_options(options)


def numbered_device(name: str, offset: int) -> str:
    """Return the device `offset` behind `name`, as `cuda:3` is 1 behind `cuda:2`; `name` without numbers."""
    kind, _, number = name.partition(":")
    if not device_class(kind, name).numbered or (number and not number.isdecimal()):
        return name
    return f"{kind}:{int(number or 0) + offset}"


def device_class(kind: str, name: str | None = None) -> type[Device]:
    """Return the class of a kind of device; `name` is how the user called it, for the ConfigError."""
    name = name or kind
    if kind in _BUILT_IN:
        return _BUILT_IN[kind]
    for entry in entry_points(group=GROUP):
        if entry.name == kind:
            found = entry.load()
            if not (isinstance(found, type) and issubclass(found, Device)):
                raise ConfigError("device", name, f"{entry.value} to be a piecework.devices.Device")
            return found
    raise ConfigError("device", name, "one of " + ", ".join(known_devices()))
