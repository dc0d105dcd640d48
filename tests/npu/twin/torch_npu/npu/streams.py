"""Streams: work is done when its call returns, so they only say who is current."""

from __future__ import annotations

from typing import Any

import torch

from torch_npu._machine import DEVICE, machine


class Stream:
    """A stream of the one device; `waits` are the streams that it waited for."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.device: torch.device = DEVICE
        self.waits: list[Stream] = []

    def wait_stream(self, stream: Stream) -> None:
        """Note it."""
        self.waits.append(stream)

    def synchronize(self) -> None:
        """A stream can't be waited for in a capture."""
        if machine().recorder is not None:
            raise RuntimeError("a stream is waited for in the middle of a capture")
