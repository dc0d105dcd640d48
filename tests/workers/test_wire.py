"""Frames on a socket pair: what must not wait doesn't, and descriptors stay in the process that got them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from piecework.workers.process.wire import Channel, channel_pair

LIMIT = 20


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = channel_pair()
    yield ours, Channel(theirs)
    ours.close()
    theirs.close()


def in_time(what: Any) -> Any:
    """What a call returns or raises; it must not sleep."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(what())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT)
    assert not thread.is_alive(), "it waits"
    return found[0]


def test_an_empty_channel_is_read_without_waiting(pair: tuple[Channel, Channel]) -> None:
    ours, theirs = pair
    assert isinstance(in_time(lambda: ours.frames(wait=False)), BlockingIOError)
    theirs.send(3, b"here")
    (frame,) = in_time(lambda: ours.frames(wait=False))
    assert (frame.kind, frame.body, frame.fds) == (3, b"here", ())


def test_posts_with_descriptors_do_not_wait_and_come_whole_and_in_order(
    pair: tuple[Channel, Channel],
) -> None:
    ours, theirs = pair
    ends = [os.memfd_create(str(number)) for number in range(8)]
    sent = [in_time(lambda end=end: ours.post(1, b"x" * 300_000, [end])) for end in ends]
    assert False in sent and ours.unsent, "more than the socket holds"
    frames: list[Any] = []
    while len(frames) < len(ends):
        ours.flush()
        frames += theirs.frames()
    assert not ours.unsent
    for end, frame in zip(ends, frames, strict=True):
        (got,) = frame.fds
        assert frame.body == b"x" * 300_000 and os.fstat(got).st_ino == os.fstat(end).st_ino
        assert not os.get_inheritable(got), "programs that are started later must not have it"
        os.close(got)
        os.close(end)


def test_a_cut_channel_gives_what_is_here_and_then_its_end(pair: tuple[Channel, Channel]) -> None:
    ours, theirs = pair
    theirs.send(1, b"before")
    ours.cut()
    assert [frame.body for frame in in_time(ours.frames)] == [b"before"]
    assert isinstance(in_time(ours.frames), EOFError)
    ours.close()
    ours.cut()
