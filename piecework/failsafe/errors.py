"""Which errors are a device's failure, and the errors of fail-safe execution itself."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from concurrent.futures import CancelledError

import torch

from piecework.errors import (
    ConfigError,
    DeviceError,
    DeviceLostError,
    ModelError,
    PieceworkError,
    RequestError,
)
from piecework.failsafe.events import Failure, Stage

# Runtimes that report a lost device as a bare RuntimeError say so in its text.
_LOST = (
    "CUDA error",
    "CUDA driver error",
    "CUBLAS_STATUS",
    "cuDNN error",
    "HIP error",
    "NPU error",
    "NPU function error",
)
_SIGNS = (*_LOST, "Exception from src/")  # OpenVINO's, whose pieces share the host's memory
_LOST_KINDS = ("AcceleratorError", "DeviceLostError", "WorkerLostError")


class ExhaustedError(PieceworkError):
    """Every device failed, or may not be moved from; `failures` says where and why, in the list's order."""

    def __init__(self, failures: Sequence[Failure]) -> None:
        self.failures = tuple(failures)
        super().__init__("all devices failed: " + "; ".join(map(str, self.failures)))


class RetryRefusedError(PieceworkError):
    """A run failed that may have written its own inputs, so that it can't be run again on `device`.

    The device that is active now runs the next one, whose inputs have to be given anew.
    """

    def __init__(self, device: str, inputs: Sequence[int]) -> None:
        self.device = device
        self.inputs = tuple(inputs)
        super().__init__(
            f"the failed run writes its inputs {list(self.inputs)} in place, so {device} doesn't repeat it: "
            "set them again and run, or take snapshots (Policy.snapshot)"
        )


def is_device_error(error: BaseException, stage: Stage) -> bool:
    """Say whether another device may do better. Mistakes of the user and cancellation fail everywhere.

    Out of memory counts while a model is made, not while it runs: there a smaller batch is the cure.
    """
    if not isinstance(error, Exception) or isinstance(error, CancelledError | RequestError | ModelError):
        return False
    if isinstance(error, ConfigError):
        return stage == "compile" and error.field == "device"  # the hardware isn't there
    if out_of_memory(error):
        return stage != "run"
    if isinstance(error, DeviceError | ExhaustedError | torch.AcceleratorError):
        return True
    if stage != "run":
        return not isinstance(error, ValueError | TypeError)
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def loses_memory(error: BaseException) -> bool:
    """Say whether what the memory of a failed device held can't be read, or can't be believed, any more.

    An error of CUDA or the like leaves its context unusable, and may come from a kernel that wrote elsewhere.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, DeviceLostError | torch.AcceleratorError):
            return True
        if any(sign in str(seen) for sign in _LOST):
            return True
        if isinstance(seen, ExhaustedError) and any(f.kind in _LOST_KINDS for f in seen.failures):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def out_of_memory(error: BaseException) -> bool:
    """Say whether memory is what an error is about."""
    if isinstance(error, DeviceError):
        return error.point == "memory"
    return isinstance(error, MemoryError | torch.OutOfMemoryError)


def let_go(error: BaseException) -> None:
    """Drop what an error's frames hold, weights for instance, and keep the lines that it names."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
