"""Exceptions on their way from a child to its parent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from piecework.errors import (
    CaptureError,
    ConfigError,
    DeviceError,
    DeviceLostError,
    ModelError,
    WorkerError,
)
from piecework.workers.process.messages import Fault

_PLAIN = (type(None), bool, int, float, str)
_MADE: dict[str, Callable[..., Exception]] = {
    "ConfigError": ConfigError,
    "ModelError": ModelError,
    "DeviceError": DeviceError,
    "DeviceLostError": DeviceLostError,
    "CaptureError": CaptureError,
}


def fault_of(error: BaseException) -> Fault:
    """Describe an exception; a value that is no plain one travels as its repr."""
    import traceback  # a child that never fails need not wait for it

    values: tuple[Any, ...]
    match error:
        case ConfigError():
            value = error.value if isinstance(error.value, _PLAIN) else repr(error.value)
            values = (error.field, value, error.allowed)
        case DeviceError():
            values = (error.device, error.point, error.reason)
        case _:
            values = (str(error),)
    names = [kind.__name__ for kind in type(error).__mro__]
    kind = next((name for name in names if name in _MADE), names[0])
    return Fault(kind, str(error), values, "".join(traceback.format_exception(error)))


def raised(fault: Fault, worker: str) -> Exception:
    """Make the exception anew, with the child's traceback as a note; an unknown one is a WorkerError."""
    make = _MADE.get(fault.kind)
    error = make(*fault.values) if make else WorkerError(worker, f"{fault.kind}: {fault.message}")
    error.add_note(f"In the worker {worker}:\n{fault.traceback}")
    return error
