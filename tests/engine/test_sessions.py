"""Which slot a request gets, and what it finds there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from piecework.engine.request import Request
from piecework.engine.sessions import Sessions
from piecework.kvcache import PagePool
from piecework.sampling import SamplingParams


def ask(*ids: int) -> Request:
    nothing: Any = SimpleNamespace()
    return Request("r", 0, ids, SamplingParams(), 0, 4, frozenset(), lambda delta: None, nothing)


class Slots:
    """Sessions over two slots."""

    def __init__(self) -> None:
        self.pool = PagePool(3)
        self.sessions = Sessions(self.pool)

    def run(self, *ids: int, keep: bool = True, reuse: bool = True) -> tuple[int, int]:
        """Admit a request, compute its prompt and end it; returns its slot and what it found there."""
        request = ask(*ids)
        assert self.sessions.admit(request, reuse=reuse)
        found = request.pages[0], request.computed
        request.computed = len(ids)
        self.end(request, keep=keep)
        return found

    def end(self, request: Request, *, keep: bool = True) -> None:
        self.sessions.release(request, keep=keep)
        self.pool.release(request.pages)


def test_a_prompt_that_goes_on_begins_behind_what_is_there() -> None:
    slots = Slots()
    first, _ = slots.run(5, 6, 7)
    second, known = slots.run(8, 9)
    assert second != first and known == 0
    assert slots.run(5, 6, 7, 1, 2) == (first, 3)
    assert slots.run(5, 6, 7, 1, 2) == (first, 4)  # the last one is always computed
    assert slots.run(5, 6, 4) == (first, 2)
    assert slots.run(8, 9, 1, reuse=False) == (second, 0)  # the least recently used


def test_two_chats_that_begin_alike_have_a_slot_each() -> None:
    slots = Slots()
    first, _ = slots.run(1, 2, 5, 6, 7)
    second, known = slots.run(1, 2, 8, 9, 3)
    assert second != first and known == 0
    assert slots.run(1, 2, 5, 6, 7, 4) == (first, 5)
    assert slots.run(1, 2, 8, 9, 3, 4) == (second, 5)


def test_a_slot_is_one_request_s_at_a_time() -> None:
    slots = Slots()
    running = ask(1, 2), ask(1, 2)
    assert all(slots.sessions.admit(request, reuse=True) for request in running)
    assert not slots.sessions.admit(ask(3), reuse=True)
    assert sorted(p for r in running for p in r.pages) == [1, 2] and slots.pool.free == 0
    slots.end(running[0])
    assert slots.sessions.admit(ask(3), reuse=True)


def test_what_is_not_to_be_trusted_is_not_kept() -> None:
    slots = Slots()
    request = ask(1, 2, 3)
    slots.sessions.admit(request, reuse=True)
    request.computed = 3
    slots.sessions.forget(request.pages)
    slots.end(request)
    assert slots.run(1, 2, 3, 4, keep=False)[1] == 0
    assert slots.run(1, 2, 3, 4)[1] == 0
    assert slots.run(1, 2, 3, 4)[1] == 3
