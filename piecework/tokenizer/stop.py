"""Finds stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text on, up to the first stop string; text that might begin one is held back until it is clear.

    The stop string that is complete first wins, and the longest of those that end at the same place: the
    result doesn't depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include_stop
        self._held = ""
        self._ended = False

    def push(self, text: str, check: bool = True) -> tuple[str, str | None]:
        """Take more text; return what is clear now, and the stop string if one is complete.

        With `check` False, a stop string that ends within `text` is plain text. After a stop string all
        further text is dropped.
        """
        if self._ended:
            return "", None
        if not self._stops:
            return text, None
        known = len(self._held)
        text = self._held + text
        if check and (found := self._first_match(text, known)):
            end, stop = found
            self._held, self._ended = "", True
            return text[: end if self._include else end - len(stop)], stop
        hold = max(self._open_length(text, stop) for stop in self._stops)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold], None

    def flush(self) -> str:
        """Return what was held back; no stop string will become of it."""
        text, self._held = self._held, ""
        return text

    def _first_match(self, text: str, known: int) -> tuple[int, str] | None:
        """Return (end, stop) of the match that ends first, after place `known` of the text."""
        matches = []
        for stop in self._stops:
            start = text.find(stop, max(0, known + 1 - len(stop)))
            if start >= 0:
                matches.append((start + len(stop), -len(stop), stop))
        if not matches:
            return None
        end, _, stop = min(matches)
        return end, stop

    def _open_length(self, text: str, stop: str) -> int:
        """Return the length of the longest end of the text that a stop string begins with."""
        start = max(0, len(text) - len(stop) + 1)
        while (start := text.find(stop[0], start)) >= 0:
            if stop.startswith(text[start:]):
                return len(text) - start
            start += 1
        return 0
