"""Whose turn it is to read a channel: the thread's that attends to the child, or for once a caller's."""

from __future__ import annotations

import os
import select
import selectors
import threading

from piecework.workers.process.wire import Channel

_EPOLL = getattr(selectors, "EpollSelector", ())  # where the kernel can be told from any thread


class Turns:
    """A caller who waits for an answer may take it off the channel itself, which saves a thread's wake-up.

    The attendant sleeps on a selector that has the channel, and looks away meanwhile. Where that can't be
    arranged, or another one reads, `take` refuses, and the attendant reads.
    """

    def __init__(self, selector: selectors.BaseSelector, channel: Channel) -> None:
        """`selector` has the channel already, for reading only."""
        self._lock = threading.Lock()
        self._selector = selector
        self._channel = channel.fileno()
        self._writer: int | None = None
        self._epoll: select.epoll | None = None
        if isinstance(selector, _EPOLL):
            self._epoll = select.epoll.fromfd(os.dup(selector.fileno()))
        self._open = self._epoll is not None

    def take(self) -> bool:
        """Begin to read as a caller; False where that must not be."""
        if not self._lock.acquire(blocking=False):
            return False
        if not self._open:
            self._lock.release()
            return False
        assert self._epoll is not None
        self._epoll.modify(self._channel, 0)
        return True

    def give(self) -> None:
        """End what `take` began; whatever has come since is the attendant's."""
        try:
            if self._open and self._epoll is not None:
                self._epoll.modify(self._channel, select.EPOLLIN)
        finally:
            self._lock.release()

    def attend(self, *, wait: bool = False) -> bool:
        """Begin to read as the attendant, who waits for a caller only where that one can't be long."""
        return self._lock.acquire(blocking=wait)

    def leave(self, *, last: bool = False) -> None:
        """End what `attend` began; after the `last` time no caller reads any more."""
        self._open = self._open and not last
        self._lock.release()

    def watch_writing(self, wanted: bool) -> None:
        """Have the attendant's selector say when the channel takes more, or not; attendant only.

        The descriptor is one of its own, so that a caller's turn changes nothing of it.
        """
        if wanted and self._writer is None:
            self._writer = os.dup(self._channel)
            self._selector.register(self._writer, selectors.EVENT_WRITE)
        elif self._writer is not None and not wanted:
            self._selector.unregister(self._writer)
            os.close(self._writer)
            self._writer = None

    def close(self) -> None:
        """Close what is open; nobody reads any more."""
        with self._lock:
            self._open = False
            if self._epoll is not None:
                self._epoll.close()
