"""How many processors this process may run on, and so how many threads may compute in it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from piecework.errors import ConfigError

_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""With any of these OpenMP may bind the thread that asks to one processor, whatever the others have."""


def usable_processors(environment: Mapping[str, str] = os.environ) -> int:
    """Count the processors that this process may run on; all of the machine where that can't be told."""
    every = os.cpu_count() or 1
    if not hasattr(os, "sched_getaffinity") or any(environment.get(name) for name in _BINDING):
        return every
    return len(os.sched_getaffinity(0))


def check_threads(threads: int | None) -> None:
    """Refuse more threads than processors by a ConfigError: those of one loop would wait for each other."""
    usable = usable_processors()
    if threads is not None and threads > usable:
        allowed = f"an integer of at least 1 and at most {usable}, the processors that this process may use"
        raise ConfigError("threads", threads, allowed)
