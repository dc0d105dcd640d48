"""Named timers, byte counters and event counters, and the one clock of the project.

A `Profile` is handed to whoever measures; there is no global one. It is off by default, and then
`time` hands out one shared object that does nothing: well below 1 us a block.

    profile = Profile()
    profile.enable()
    with profile.time("prefill.run"):
        ...
    profile.add_bytes("copy.weights", tensor.nbytes)
    profile.snapshot()["timers"]["prefill.run"]["mean_ms"]
"""

from __future__ import annotations

import threading
import time as _time
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TypedDict

now = _time.perf_counter
"""Monotonic seconds. Everything that needs a clock takes this one, so that tests have one place to look."""

processor_time = _time.process_time
"""Seconds that the processor has spent on this process, in all of its threads."""

_OFF: AbstractContextManager[None] = nullcontext()


class TimerSnapshot(TypedDict):
    """What one timer saw. Times are in milliseconds."""

    count: int
    total_ms: float
    mean_ms: float
    min_ms: float
    max_ms: float


class BytesSnapshot(TypedDict):
    """What one byte counter saw."""

    count: int
    total: int


class Snapshot(TypedDict):
    """All that a profile holds, by name; plain values that go into JSON as they are."""

    timers: dict[str, TimerSnapshot]
    bytes: dict[str, BytesSnapshot]
    counters: dict[str, int]


class Profile:
    """A thread-safe set of named timers (ms) and counters; names are dotted, `decode.run`.

    Nothing is recorded while it is off. A timed block that began while it was on is recorded
    even where the profile was switched off before the block ended.
    """

    def __init__(self, enabled: bool = False) -> None:
        self.enabled = enabled
        self._lock = threading.Lock()
        self._timers: dict[str, list[float]] = {}  # name -> [count, total, min, max], times in seconds
        self._bytes: dict[str, list[int]] = {}  # name -> [count, total]
        self._counters: dict[str, int] = {}

    def enable(self) -> None:
        """Start recording; what was recorded before stays."""
        self.enabled = True

    def disable(self) -> None:
        """Stop recording; what was recorded stays readable."""
        self.enabled = False

    def time(self, name: str) -> AbstractContextManager[None]:
        """Time the body of a `with` statement under `name`, also when it raises."""
        return _Timed(self, name) if self.enabled else _OFF

    def add_time(self, name: str, seconds: float) -> None:
        """Record a duration that was measured with `now` elsewhere (a stage that spans functions)."""
        if not self.enabled:
            return
        self._record(name, seconds)

    def add_bytes(self, name: str, n: int) -> None:
        """Add `n` bytes to the byte counter `name`."""
        if not self.enabled:
            return
        with self._lock:
            entry = self._bytes.setdefault(name, [0, 0])
            entry[0] += 1
            entry[1] += n

    def count(self, name: str, n: int = 1) -> None:
        """Add `n` to the event counter `name`."""
        if not self.enabled:
            return
        with self._lock:
            self._counters[name] = self._counters.get(name, 0) + n

    def snapshot(self) -> Snapshot:
        """Return a copy of everything recorded, sorted by name; later records do not change it."""
        with self._lock:
            timers = {name: _timer_snapshot(self._timers[name]) for name in sorted(self._timers)}
            sizes: dict[str, BytesSnapshot] = {
                name: {"count": entry[0], "total": entry[1]} for name, entry in sorted(self._bytes.items())
            }
            return {"timers": timers, "bytes": sizes, "counters": dict(sorted(self._counters.items()))}

    def reset(self) -> None:
        """Forget everything recorded; on or off stays as it is."""
        with self._lock:
            self._timers.clear()
            self._bytes.clear()
            self._counters.clear()

    def _record(self, name: str, seconds: float) -> None:
        with self._lock:
            entry = self._timers.get(name)
            if entry is None:
                self._timers[name] = [1, seconds, seconds, seconds]
                return
            entry[0] += 1
            entry[1] += seconds
            entry[2] = min(entry[2], seconds)
            entry[3] = max(entry[3], seconds)


class _Timed:
    """One timed block. Each `with` has its own, so that blocks may nest and threads may share a name."""

    __slots__ = ("_name", "_profile", "_start")

    def __init__(self, profile: Profile, name: str) -> None:
        self._profile = profile
        self._name = name

    def __enter__(self) -> None:
        self._start = now()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._profile._record(self._name, now() - self._start)


def _timer_snapshot(entry: list[float]) -> TimerSnapshot:
    count, total, low, high = entry
    return {
        "count": int(count),
        "total_ms": total * 1e3,
        "mean_ms": total / count * 1e3,
        "min_ms": low * 1e3,
        "max_ms": high * 1e3,
    }
