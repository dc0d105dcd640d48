"""Runs something long beside a thread that has deadlines to keep."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def run_beside(work: Callable[[], T], left: Callable[[], float | None], on_deadline: Callable[[], None]) -> T:
    """Return what `work` returns; meanwhile `on_deadline` is called when the seconds of `left` are over.

    Without a deadline `work` runs in this thread, else in one of its own. Raises what `work` raises.
    """
    if left() is None:
        return work()
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name="piecework-takeover", daemon=True)
    thread.start()
    while (seconds := left()) is not None:
        try:
            return done.result(seconds)
        except TimeoutError:
            if done.done():
                raise  # the work's own
            on_deadline()
    return done.result()
