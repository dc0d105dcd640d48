"""How busy the rest of the machine is: a run that shared it with others is told from one that did not."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

QUIET = 0.05
"""The share of all cores that others may take."""
_LOOK_SECONDS = 0.3
_TRIES = 3


class Machine:
    """Watches the CPU time of all processes in /proc, as Linux has it; without /proc nothing is known.

    `patience` is how many seconds may be spent in all on waiting until others pause, `lock` a file that all
    who measure on this machine lock.
    """

    def __init__(self, patience: float, lock: Path | None = None) -> None:
        self.patience = patience
        self._lock = lock
        self._known = Path("/proc/stat").exists()

    def timed(self, pid: int, run: Callable[[], T]) -> tuple[T, float | None]:
        """Call `run`, for which the process `pid` works, when others pause; once more where they came back.

        Returns what the call gave during which others did least, and the share of all cores that they had.
        """
        best: tuple[T, float | None] | None = None
        for _ in range(_TRIES):
            self._wait()
            before, start = _busy() - _own(pid) if self._known else 0.0, time.monotonic()
            result = run()
            if not self._known:
                return result, None
            seconds = max(time.monotonic() - start, 1e-3)
            share = max(0.0, (_busy() - _own(pid) - before) / seconds / _cores())
            if best is None or best[1] is None or share < best[1]:
                best = result, share
            if share <= QUIET or self.patience <= 0:
                break
            self.patience -= seconds
        assert best is not None
        return best

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the lock, if there is one."""
        if self._lock is None:
            yield
            return
        with self._lock.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # closing the file unlocks it
            yield

    def _wait(self) -> None:
        while self._known and self.patience > 0:
            before = _busy()
            time.sleep(_LOOK_SECONDS)
            if (_busy() - before) / _LOOK_SECONDS / _cores() <= QUIET:
                return
            self.patience -= _LOOK_SECONDS


def _busy() -> float:
    """CPU seconds of everyone since the start of the machine, and those that its host took (steal).

    Fields of the first line of /proc/stat (proc(5)): user, nice, system, idle, iowait, irq, softirq, steal.
    """
    fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]
    user, nice, system, _, _, irq, softirq, steal = map(int, fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own(pid: int) -> float:
    """CPU seconds of one process (utime and stime of /proc/PID/stat); 0 where it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0.0
    user, system = text.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _cores() -> int:
    return os.cpu_count() or 1
