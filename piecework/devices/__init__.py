"""Kinds of hardware."""

from piecework.devices.base import Device
from piecework.devices.registry import known_devices, make_device

__all__ = ["Device", "known_devices", "make_device"]
