"""The NPU behind the stand-in: memory, graphs that exist, and streams. `reset` gives a new one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from piecework.devices.sim.memory import SimMemory
from piecework.devices.sim.record import Recorder

GRAPHS = 2048
"""Graphs that fit: above what the device class lets itself have."""


@dataclass
class Machine:
    """State of one simulated NPU."""

    memory: SimMemory = field(default_factory=lambda: SimMemory(1 << 28))
    graphs: int = 0
    streams: list[Any] = field(default_factory=list)
    recorder: Recorder | None = None
    captured_calls: int = 0
    called: set[str] = field(default_factory=set)


_machines = [Machine()]
DEVICE = torch.device("cpu")


def machine() -> Machine:
    """The NPU as it is now."""
    return _machines[0]


def reset(machine: Machine | None = None) -> Machine:
    """Put a new NPU in place."""
    _machines[0] = machine or Machine()
    return _machines[0]
