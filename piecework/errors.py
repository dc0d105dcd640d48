"""The errors that Piecework raises. Each names the field, the value and what is allowed."""

from __future__ import annotations

from typing import Any


class PieceworkError(Exception):
    """Base of every error that Piecework raises on purpose."""


class ConfigError(PieceworkError, ValueError):
    """A setting that cannot be used. `field`, `value` and `allowed` say which and why."""

    def __init__(self, field: str, value: Any, allowed: str) -> None:
        self.field = field
        self.value = value
        self.allowed = allowed
        super().__init__(f"{field}={value!r} is not allowed: {allowed}")


class RequestError(PieceworkError, ValueError):
    """A request that the client has to change. The server answers it with a 4xx status.

    `param` is the request's field, `code` a short machine-readable reason in the style of the
    OpenAI API (`invalid_value`, `context_length_exceeded`, ...).
    """

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value") -> None:
        self.param = param
        self.code = code
        super().__init__(message)


class QueueFullError(PieceworkError):
    """The waiting queue is at its limit; the client may come back after `retry_after` seconds."""

    def __init__(self, limit: int, retry_after: int = 1) -> None:
        self.limit = limit
        self.retry_after = retry_after
        super().__init__(f"{limit} requests wait already, which is the limit (max_queue); retry later")


class ModelError(PieceworkError):
    """A model that cannot be found, read or loaded; the message names the file or tensor."""


class DeviceError(PieceworkError):
    """A device failed; `device`, `point` (compile, capture, run, memory) and `reason` say where and how."""

    def __init__(self, device: str, point: str, reason: str) -> None:
        self.device = device
        self.point = point
        self.reason = reason
        super().__init__(f"device {device} failed at {point}: {reason}")


class WorkerError(PieceworkError):
    """Code in a worker raised what no other class of ours says; `worker` is its name, `reason` the error."""

    def __init__(self, worker: str, reason: str) -> None:
        self.worker = worker
        self.reason = reason
        super().__init__(f"in the worker {worker}: {reason}")


class DeviceLostError(DeviceError):
    """A device is gone, and what its memory held can't be read any more."""


class WorkerLostError(DeviceLostError):
    """A worker's process ended, or was ended after a silence, and what it held is gone.

    `exit_code` is negative for a signal, None where it is not known; `stderr` is the end of what it wrote.
    """

    def __init__(
        self, worker: str, reason: str, *, exit_code: int | None = None, stderr: str = "", point: str = "run"
    ) -> None:
        self.exit_code = exit_code
        self.stderr = stderr
        said = f"; it wrote last: {stderr}" if stderr else ""
        super().__init__(worker, point, reason + said)
        self.args = (f"the worker {reason}{said}",)


class CaptureError(PieceworkError):
    """Work that can't be captured, or a captured graph that can't be replayed; the message names the tensor
    or operation."""


class EngineDeadError(PieceworkError):
    """The engine stopped and answers no more requests; `cause` is the reason."""

    def __init__(self, cause: str) -> None:
        self.cause = cause
        super().__init__(f"the engine is dead: {cause}")
