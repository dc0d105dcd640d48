"""`PIECEWORK_DEBUG=1..5` shows deeper layers of a run, as log records of `piecework.debug`.

    1  what was planned at the start, and the counters
    2  each pass, and the distinct pieces
    3  the graph after passes
    4  the code that each distinct piece runs
    5  every step: phase, size, graph mode, time

A higher number shows the lower ones too. Without the variable nothing is worked out.
"""

from __future__ import annotations

import logging
import os
import sys

from piecework.errors import ConfigError

VARIABLE = "PIECEWORK_DEBUG"
DEEPEST = 5
log = logging.getLogger("piecework.debug")


def level() -> int:
    """Return how deep to look, 0 for not at all; anything but a number from 0 to 5 is a ConfigError."""
    value = os.environ.get(VARIABLE, "")
    if value in ("", "0"):
        return 0
    if not value.isdecimal() or int(value) > DEEPEST:
        raise ConfigError(VARIABLE, value, f"a number from 0 to {DEEPEST}")
    return int(value)


def say(layer: int, text: str) -> None:
    """Log `text`, that belongs to a layer. Whoever asked for layers sees them, whatever is logged else.

    Records go where the package's do; where nobody handles those, to standard error.
    """
    log.setLevel(logging.DEBUG)
    if not log.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
    log.debug("[%d] %s", layer, text, extra={"layer": layer})
