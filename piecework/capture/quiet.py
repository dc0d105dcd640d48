"""Keeps the garbage collector away from captures."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """Collect garbage once, then none inside.

    A tensor that the collector frees in the middle of a capture calls the device's allocator, which can
    break the capture; and each run of the collector looks at every object of the process. Nothing is frozen:
    letting it go again would let go of the imports, too, which stay frozen (`piecework.collector`).
    """
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
