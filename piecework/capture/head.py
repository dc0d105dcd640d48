"""The head as a program of its own: logits of those rows that need them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from piecework.capture.capture import CapturedProgram
from piecework.capture.sizes import padded_size
from piecework.devices import Device
from piecework.graph.counters import Counters
from piecework.graph.program import Program

_NO_HOLES: Mapping[str, Any] = {}


class HeadGraphs:
    """Runs a head program, as a graph where a captured size has room for the rows."""

    def __init__(self, program: Program, device: Device, pool: Any, counters: Counters, debug: bool) -> None:
        self.program = program
        self.counters = counters
        self._device = device
        self._captured = CapturedProgram(program, device, "piecewise", pool, counters, debug=debug)
        self._rows: Tensor | None = None
        self._logits: Tensor | None = None

    def capture(self, size: int, row: Tensor) -> None:
        """Capture at `size` rows like `row` [1, H]; the largest size comes first."""
        if self._rows is None:
            self._rows = self._device.zeros((size, row.shape[1]), row.dtype)
        self._captured.capture(size, [self._rows[:size]], _NO_HOLES)

    def release(self) -> None:
        """Give all graphs back to the device."""
        self._captured.release()

    def __call__(self, rows: Tensor) -> Tensor:
        """Rows [R, H] -> logits [R, V]; the next call may overwrite them."""
        count = rows.shape[0]
        size = padded_size(self._captured.sizes, count)
        if size is None or self._rows is None:
            self.counters.add("eager_runs")
            return self._run(rows)
        static = self._rows[:size]
        static[:count].copy_(rows)
        static[count:].zero_()
        self.counters.add("padded_tokens", size - count)
        return self._captured.replay(size, [static], _NO_HOLES)[0][:count]

    def _run(self, rows: Tensor) -> Tensor:
        """Run without a graph. Logits are so large that the system would give new memory for them at every
        step and clear it, page by page; so those of a piece that can write into given memory stay.
        """
        program, count = self.program, rows.shape[0]
        if not program.takes_out:
            logits: Tensor = program.run([rows])
            return logits
        if self._logits is None or self._logits.shape[0] < count:
            self._logits = None  # before there is more of it
            self._logits = program.run([rows])
            return self._logits
        made: Tensor = program.run([rows], out=self._logits[:count])
        return made
