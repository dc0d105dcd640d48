"""Settles what `auto` means: the run's precision, and whether a GGUF file's blocks stay as they are."""

from __future__ import annotations

import torch

from piecework.config import LoadConfig
from piecework.devices import Device
from piecework.errors import ConfigError
from piecework.weights.checkpoint import Checkpoint
from piecework.weights.gguf.checkpoint import GgufCheckpoint


def settle(
    options: LoadConfig, checkpoint: Checkpoint, stored: str | None, device: Device
) -> tuple[torch.dtype, str]:
    """Return the precision to run in, and the quantisation to ask the checkpoint for.

    Blocks stay where the device multiplies them fast. Who names float32 wants the numbers of the file, so
    that blocks become floats then. A precision that isn't named is the device's choice.

    Args:
        stored: the precision that the checkpoint states, if any.

    Raises:
        ConfigError: the device doesn't run this precision.
    """
    quantization = options.quantization
    if quantization == "auto" and isinstance(checkpoint, GgufCheckpoint):
        fast = device.keeps_blocks() and checkpoint.has_blocks
        quantization = "gguf" if fast and options.dtype != "float32" else "none"
    if options.dtype == "auto":
        dtype = device.default_dtype("blocks" if quantization == "gguf" else stored)
    else:
        dtype = getattr(torch, options.dtype)
    if not device.supports_dtype(dtype):
        raise ConfigError("dtype", options.dtype, f"a precision that {device.name} runs")
    return dtype, quantization
