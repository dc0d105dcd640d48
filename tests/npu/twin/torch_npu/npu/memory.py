"""Memory that is kept for later, of which there is none here."""

from __future__ import annotations

from torch_npu._machine import machine


def empty_cache() -> None:
    """Take back what was freed."""
    machine().memory.settle()
