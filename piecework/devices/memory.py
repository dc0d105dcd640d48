"""How much host memory is left, as the kernel and the control group see it."""

from __future__ import annotations

import os
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_host_memory() -> int:
    """Return the bytes of host memory that can be allocated without swapping.

    Linux's MemAvailable, or the room left in the control group where that is less; elsewhere the
    number of free pages.
    """
    try:
        available = _meminfo_available()
    except (OSError, ValueError, StopIteration):
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    room = _cgroup_room()
    return available if room is None else min(available, room)


def _meminfo_available() -> int:
    lines = _MEMINFO.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def _cgroup_room() -> int | None:
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        return None if limit == "max" else max(0, int(limit) - used)
    except (OSError, ValueError):
        return None
