"""Times functions against each other on a device: captured where it captures, else call by call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from piecework.devices import Device
from piecework.profile import now

Sample = Callable[[], float]
_MOST_CALLS = 200
_MOST_CAPTURED = 200
_WARM_CALLS = 2  # a result is there until the next one is made, so two of them need memory


class Timer:
    """Makes samples of functions on one device. `captured` says whether launches from Python are left out.

    On a device with graphs a sample is the replay of a graph that holds many calls, so what is timed is
    what the device does. Otherwise it is a loop of calls.
    """

    def __init__(self, device: Device, sample_seconds: float) -> None:
        self._device = device
        self._seconds = sample_seconds
        self._pool = device.new_pool() if device.captures else None
        self.captured = device.captures

    def sample(self, fn: Callable[[], Any]) -> Sample:
        """Return a function that runs `fn` a number of times and returns the seconds of one."""
        fn()  # compiles, allocates, chooses
        count = self._count(fn)

        def loop(result: Any = None) -> Any:
            for _ in range(count):
                result = fn()
            return result

        def from_warm() -> float:
            # What ran before left other data in the caches, and perhaps no memory for results. Then the
            # first calls are slow: those of the function behind the largest one, round after round.
            for _ in range(_WARM_CALLS):
                result = fn()
            return self._seconds_of(lambda: loop(result)) / count

        if not self.captured:
            return from_warm
        self._device.warm_up(fn)
        graph, kept = self._device.capture(loop, self._pool)

        def replay() -> float:
            return self._seconds_of(graph.replay) / count

        replay.kept = kept  # type: ignore[attr-defined]  # what the graph writes to stays allocated
        return replay

    def _count(self, fn: Callable[[], Any]) -> int:
        most = _MOST_CAPTURED if self.captured else _MOST_CALLS
        one = min(self._seconds_of(fn) for _ in range(2))
        return max(1, min(most, round(self._seconds / max(one, 1e-7))))

    def _seconds_of(self, fn: Callable[[], Any]) -> float:
        self._device.synchronize()
        start = now()
        fn()
        self._device.synchronize()
        return now() - start


def alternate(samples: Sequence[Sample], repeats: int) -> list[list[float]]:
    """Take `repeats` samples of each, in turn; every round begins with another one. One list for each."""
    taken: list[list[float]] = [[] for _ in samples]
    for repeat in range(repeats):
        for place in range(len(samples)):
            chosen = (repeat + place) % len(samples)
            taken[chosen].append(samples[chosen]())
    return taken
