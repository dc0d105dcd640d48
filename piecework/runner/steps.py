"""Tells of each step what ran, for `PIECEWORK_DEBUG=5`."""

from __future__ import annotations

from piecework.debug import say
from piecework.devices.base import Phase
from piecework.runner.programs import Programs

LAYER = 5


class StepTeller:
    """Reads what a step did from the body's counters: what happened, and not what was meant to."""

    def __init__(self, programs: Programs) -> None:
        self._counters = programs.counters
        self._full = programs.options.decode == "full"
        self._steps = 0
        self._before = self._counters.snapshot()

    def tell(self, phase: Phase, sequences: int, tokens: int, seconds: float) -> None:
        """Tell of a step that has just run."""
        after = self._counters.snapshot()
        names = ("whole_runs", "chained_runs", "eager_runs", "replays", "padded_tokens")
        whole, chained, eager, replays, padded = (after[name] - self._before[name] for name in names)
        self._before = after
        if whole:
            how = "a whole program"
        elif chained:
            how = "one call"
        elif eager:
            how = "eager pieces"
        else:
            mode = "full" if self._full and phase == "decode" and replays == 1 else "piecewise"
            how = f"{mode} graphs of {tokens + padded} rows ({padded} padded, {replays} replayed)"
        what = f"step {self._steps} {phase}: {sequences} sequences, {tokens} tokens"
        say(LAYER, f"{what}, {how}, {seconds * 1e3:.2f} ms")
        self._steps += 1
