"""The current device and stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch_npu._machine import machine
from torch_npu.npu.streams import Stream


def set_device(device: Any) -> None:
    """There is one device."""
    if device != 0:
        raise RuntimeError(f"invalid device {device}")


def synchronize(device: Any = None) -> None:
    """Work is done already, but for a capture's, which never is."""
    if machine().recorder is not None:
        raise RuntimeError("the device is waited for in the middle of a capture")


def current_stream(device: Any = None) -> Stream:
    """Return the innermost stream; None is the default one."""
    streams = machine().streams
    if not streams:
        streams.append(Stream())
    found: Stream = streams[-1]
    return found


@contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """Make a stream current."""
    current_stream()
    machine().streams.append(stream)
    try:
        yield
    finally:
        machine().streams.pop()
