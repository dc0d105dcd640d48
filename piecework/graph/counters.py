"""Counts of what the pipeline did: the numbers that tests assert and metrics show."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Counters:
    """Plain integers; `add` is safe from several threads, reading a field needs no lock.

    Attributes:
        traces, pieces, holes, distinct: of the programs that were built with these counters.
        stored_programs: programs that came out of the disk cache; their other counts are of their making.
        compiles: distinct pieces compiled; cache_hits: those of them that came out of the disk cache.
        compile_failures: pieces that run uncompiled because their compiler failed.
        moved_pieces: pieces that run on another device because theirs failed.
        captures, replays: device graphs made and run. eager_runs: runs outside a graph; chained_runs: those
            of them that were one call of the device's library.
        padded_tokens: rows that were computed for nothing.
        recompiles: compilations after the program was built; there should be none.
        pass_matches: how often each pass matched, by its name.
    """

    traces: int = 0
    pieces: int = 0
    holes: int = 0
    distinct: int = 0
    stored_programs: int = 0
    compiles: int = 0
    cache_hits: int = 0
    compile_failures: int = 0
    moved_pieces: int = 0
    captures: int = 0
    replays: int = 0
    eager_runs: int = 0
    chained_runs: int = 0
    padded_tokens: int = 0
    recompiles: int = 0
    pass_matches: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, name: str, n: int = 1) -> None:
        """Add `n` to the field `name`."""
        with self._lock:
            setattr(self, name, getattr(self, name) + n)

    def add_matches(self, pass_name: str, n: int) -> None:
        """Add `n` matches of a pass."""
        with self._lock:
            self.pass_matches[pass_name] += n

    def snapshot(self) -> dict[str, int]:
        """Return all counts by name, pass matches as `pass_matches.<name>`."""
        with self._lock:
            plain = {
                name: value for name, value in vars(self).items() if isinstance(value, int) and name[0] != "_"
            }
            return plain | {f"pass_matches.{name}": n for name, n in sorted(self.pass_matches.items())}
