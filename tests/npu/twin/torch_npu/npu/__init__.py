"""Streams, graphs and memory of the stand-in."""

from __future__ import annotations

from typing import Any

from torch_npu._machine import machine
from torch_npu.npu.graphs import NPUGraph as NPUGraph
from torch_npu.npu.graphs import graph as graph
from torch_npu.npu.graphs import graph_pool_handle as graph_pool_handle
from torch_npu.npu.memory import empty_cache as empty_cache
from torch_npu.npu.streams import Stream as Stream
from torch_npu.npu.utils import current_stream as current_stream
from torch_npu.npu.utils import set_device as set_device
from torch_npu.npu.utils import stream as stream
from torch_npu.npu.utils import synchronize as synchronize


def is_available() -> bool:
    """There is one."""
    return True


def device_count() -> int:
    """There is one."""
    return 1


def get_device_name(device_name: Any = None) -> str:
    """It is none of the real ones."""
    return "twin"


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Free and all bytes."""
    memory = machine().memory
    return memory.free_bytes, memory.capacity
