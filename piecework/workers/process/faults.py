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
from piecework.workers.process.messages import Fault, plain

_INTEGERS = range(-(2**63), 2**64)  # MessagePack's
_MADE: dict[str, Callable[..., Exception]] = {
    "ConfigError": ConfigError,
    "ModelError": ModelError,
    "DeviceError": DeviceError,
    "DeviceLostError": DeviceLostError,
    "CaptureError": CaptureError,
}


def fault_of(error: BaseException) -> Fault:
    """Describe an exception, whatever it is; a value that can't travel does so as its repr."""
    import traceback  # a child that never fails need not wait for it

    values: tuple[Any, ...]
    match error:
        case ConfigError():
            values = (error.field, error.value, error.allowed)
        case DeviceError():
            values = (error.device, error.point, error.reason)
        case _:
            values = (_text(error),)
    names = [kind.__name__ for kind in type(error).__mro__]
    kind = next((name for name in names if name in _MADE), names[0])
    story = plain("".join(traceback.format_exception(error)))
    return Fault(kind, _text(error), tuple(_value(one) for one in values), story)


def raised(fault: Fault, worker: str) -> Exception:
    """Make the exception anew, with the child's traceback as a note; an unknown one is a WorkerError."""
    make = _MADE.get(fault.kind)
    error = make(*fault.values) if make else WorkerError(worker, f"{fault.kind}: {fault.message}")
    error.add_note(f"In the worker {worker}:\n{fault.traceback}")
    return error


def _text(error: BaseException) -> str:
    try:
        return plain(str(error))
    except Exception as why:  # it is somebody's own class
        return f"its text can't be made: {type(why).__name__}"


def _value(value: Any) -> Any:
    if value is None or isinstance(value, bool | float) or (type(value) is int and value in _INTEGERS):
        return value
    return plain(value if isinstance(value, str) else repr(value))
