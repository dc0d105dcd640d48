"""The end of children: all of them within one deadline, whatever they do."""

from __future__ import annotations

import logging
import signal
from collections.abc import Sequence

from piecework.profile import now
from piecework.workers.process.process import ChildProcess

log = logging.getLogger("piecework.workers")

# Shares of the deadline at which those that are still there get a signal.
_LADDER = ((0.6, signal.SIGTERM), (0.8, signal.SIGKILL))


def close_all(children: Sequence[ChildProcess], seconds: float) -> list[ChildProcess]:
    """End all children and wait for them; those that outlived even SIGKILL are returned, for a later try.

    Each answers the calls that it has and ends by itself; who doesn't gets SIGTERM after 60% of `seconds`
    and SIGKILL after 80%. One that never got ready has nothing to finish, and gets SIGTERM at once. It may
    be called again, and from several threads.
    """
    begin = now()
    for child in children:
        child.shut_down()
        if not child.ready.done():
            child.signal(signal.SIGTERM)
    for share, number in _LADDER:
        for child in _wait(children, begin + share * seconds):
            log.warning("the worker %s (process %s) does not end: %s", child.name, child.pid, number.name)
            child.signal(number)
    alive = _wait(children, begin + seconds)
    for child in alive:
        log.error("the worker %s (process %s) survived SIGKILL", child.name, child.pid)
    return alive


def _wait(children: Sequence[ChildProcess], until: float) -> list[ChildProcess]:
    """Return those that have not ended at `until`."""
    return [child for child in children if not child.ended.wait(max(0.0, until - now()))]
