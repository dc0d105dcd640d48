"""The pause that requests see when their device fails: how long it is, and how long it may be."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace

from piecework.engine.carry import Carriage
from piecework.engine.request import Request
from piecework.profile import now

BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Upper bounds of the histograms' buckets, in seconds; a last bucket has no bound."""
_CARRIAGES = 16


@dataclass(frozen=True)
class Seconds:
    """A histogram of times: how many are at most each of BOUNDS but above the one before, and their sum."""

    counts: tuple[int, ...] = (0,) * (len(BOUNDS) + 1)
    sum: float = 0.0

    def plus(self, seconds: float) -> Seconds:
        """Return the histogram with one more."""
        place = bisect_left(BOUNDS, seconds)
        counts = (*self.counts[:place], self.counts[place] + 1, *self.counts[place + 1 :])
        return Seconds(counts, self.sum + seconds)


@dataclass(frozen=True)
class Pauses:
    """What takeovers cost so far, in seconds.

    Attributes:
        gaps: from a request's last token before to its first after.
        detections: from the begin of a step to the error that it failed with, once for each takeover.
        last_gaps, last_detection: of the latest takeover alone.
        carriages: how running requests came to the next device, the latest times, moves by hand too.
        copied_tokens, computed_tokens: of all times.
    """

    gaps: Seconds = Seconds()
    detections: Seconds = Seconds()
    last_gaps: tuple[float, ...] = ()
    last_detection: float = 0.0
    carriages: tuple[Carriage, ...] = ()
    copied_tokens: int = 0
    computed_tokens: int = 0


class Gaps:
    """Follows requests from the failure of their device to their next token. Engine's thread only."""

    def __init__(self, limit: float | None) -> None:
        """Begin with none; `limit` are the seconds that a gap may last, None for any."""
        self.pauses = Pauses()
        self._limit = limit
        self._detection = 0.0
        self._since: dict[Request, float] = {}  # those that wait for a token of the next device

    def __bool__(self) -> bool:
        """True while a request waits for its first token after a failure."""
        return bool(self._since)

    def begin(self, requests: Iterable[Request], step_began: float) -> list[Request]:
        """A step failed with these requests running: their gaps began with the last token of each.

        Returns those that didn't wait since another failure.
        """
        self._detection = now() - step_began
        fresh = [request for request in requests if request not in self._since]
        for request in fresh:
            self._since[request] = request.last_token_at or step_began
        return fresh

    def took_over(self) -> None:
        """Another device goes on."""
        detections = self.pauses.detections.plus(self._detection)
        self.pauses = replace(
            self.pauses, detections=detections, last_gaps=(), last_detection=self._detection
        )

    def carried(self, how: Carriage) -> None:
        """Running requests came to another device."""
        old = self.pauses
        self.pauses = replace(
            old,
            carriages=(*old.carriages, how)[-_CARRIAGES:],
            copied_tokens=old.copied_tokens + how.copied_tokens,
            computed_tokens=old.computed_tokens + how.computed_tokens,
        )

    def give_up(self, fresh: Iterable[Request]) -> None:
        """Nobody took over from what began with these requests."""
        for request in fresh:
            self._since.pop(request, None)

    def ended(self, request: Request) -> None:
        """A request got a token, or ended."""
        since = self._since.pop(request, None)
        if since is None or request.last_token_at is None or request.last_token_at <= since:
            return
        if len(request.output_ids) > 1:  # there was one before
            old, gap = self.pauses, request.last_token_at - since
            self.pauses = replace(old, gaps=old.gaps.plus(gap), last_gaps=(*old.last_gaps, gap))

    def overdue(self) -> list[Request]:
        """Return the requests that wait for longer than the limit."""
        if self._limit is None:
            return []
        return [request for request, since in self._since.items() if now() - since > self._limit]

    def seconds_left(self) -> float | None:
        """Seconds until a request is overdue; None where none will be."""
        if self._limit is None or not self._since:
            return None
        return max(0.0, min(self._since.values()) + self._limit - now())

    def error(self, request: Request) -> str:
        """Say why an overdue request ends."""
        return (
            f"its device failed and no other went on with it within max_failover_seconds={self._limit:g}; "
            f"{len(request.output_ids)} tokens were sent"
        )
