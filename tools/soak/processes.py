"""What the kernel tells of processes: descendants, open files, segments."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

_PROC = Path("/proc")
_POLL = 0.02
LAST_PRIORITY = 19
"""For whoever would else take all of a small machine from children that start."""


def descendants(pid: int) -> set[int]:
    """Return the pids of a process's children and theirs; those that ended meanwhile are left out."""
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        for task in _list(_PROC / str(waiting.pop()) / "task"):
            try:
                children = {int(one) for one in (task / "children").read_text().split()}
            except OSError:
                continue
            waiting += children - found
            found |= children
    return found


def started_at(pid: int) -> str | None:
    """Return what tells a process from a later one with its pid, None where it has ended.

    A zombie has ended: what is left of it belongs to whoever has to wait for it.
    """
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]  # state and starttime, proc(5)


def open_files(pid: int) -> list[str]:
    """Return what a process has open, memfd segments too, but for connections of TCP, which clients make."""
    found = []
    tcp = _tcp_inodes(pid)
    for one in _list(_PROC / str(pid) / "fd"):
        try:
            target = str(one.readlink())
        except OSError:
            continue
        if target.removeprefix("socket:").strip("[]") not in tcp:
            found.append(target)
    return sorted(found)


def shared_memory() -> set[str]:
    """Return the names of segments that have one."""
    return {path.name for path in _list(Path("/dev/shm"))}


def wait_until(condition: Callable[[], bool], seconds: float, poll: float = _POLL) -> bool:
    """Return True as soon as the condition holds, False where it doesn't after `seconds`.

    `poll` are the seconds between looks; one that asks a server takes some of its time.
    """
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(poll)
    return True


def _tcp_inodes(pid: int) -> set[str]:
    found = set()
    for name in ("tcp", "tcp6"):
        try:
            lines = (_PROC / str(pid) / "net" / name).read_text().splitlines()[1:]
        except OSError:
            continue
        found |= {line.split()[9] for line in lines}
    return found


def _list(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
