"""What other threads ask of the engine's thread, done between two steps."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from piecework.errors import EngineDeadError, PieceworkError, RequestError

log = logging.getLogger("piecework.service")

Order = tuple[Callable[[], Any], Future[Any]]
"""A call, and where its result or its error goes."""


def carry_out(orders: Iterable[Order], gone: str | None) -> None:
    """Do each and settle its future; with EngineDeadError where the engine is gone, for the reason `gone`."""
    for what, done in orders:
        if gone is not None:
            done.set_exception(EngineDeadError(gone))
            continue
        try:
            done.set_result(what())
        except Exception as error:
            if not isinstance(error, RequestError):
                unexpected = not isinstance(error, PieceworkError)
                log.warning("what was asked for between two steps failed: %s", error, exc_info=unexpected)
            done.set_exception(error)


def refuse_own_thread(engine: threading.Thread) -> None:
    """Raise PieceworkError on the engine's thread: an order that waits for the next step would stop it."""
    if threading.current_thread() is engine:
        raise PieceworkError(
            "what is done between two steps can't be waited for on the engine's thread, which calls "
            "listeners and observers: ask from another thread"
        )
