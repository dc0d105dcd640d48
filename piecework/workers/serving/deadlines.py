"""How long a step may go without an answer, from how long such steps took."""

from __future__ import annotations

from collections import deque
from statistics import median

_LEAST = 10.0
_TIMES = 20
_KEPT = 32  # latest steps of each size


class Deadlines:
    """Limits for steps by their number of rows, in powers of two: the larger ones take longer.

    A limit is 20 times the median of such steps, and at least 10 seconds. Steps of a size that didn't run yet
    are taken to need as much more as they have more rows; before the first step nothing is known, and
    lazy set-up may still be due, so that it gets what a start gets.
    """

    def __init__(self, fixed: float | None, first: float) -> None:
        """Begin without steps. `fixed` holds for all steps, where it is given; `first` for the first one."""
        self._fixed = fixed
        self._first = first
        self._taken: dict[int, deque[float]] = {}

    def seconds(self, rows: int) -> float:
        """Return the limit of a step of `rows` rows."""
        if self._fixed is not None:
            return self._fixed
        if not self._taken:
            return self._first
        size = rows.bit_length()
        smaller = [known for known in self._taken if known <= size]
        nearest = max(smaller) if smaller else min(self._taken)
        more = 2 ** max(0, size - nearest)
        return float(max(_LEAST, _TIMES * more * median(self._taken[nearest])))

    def took(self, rows: int, seconds: float) -> None:
        """Note a step that worked."""
        self._taken.setdefault(rows.bit_length(), deque(maxlen=_KEPT)).append(seconds)
