"""All workers below one: started together, found by number or name, closed together."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass

from piecework.errors import ConfigError
from piecework.profile import now
from piecework.workers.endpoint import Endpoint
from piecework.workers.tasks.handles import HandleError
from piecework.workers.tasks.limits import Limits
from piecework.workers.tasks.members import Calls, Child, Member

_GRACE = 0.5  # seconds that an endpoint's close may be late before nobody waits for it


@dataclass(frozen=True)
class Context:
    """What a worker knows of one of those below it."""

    name: str
    device: str
    generation: int
    level: int
    pid: int | None
    buffers: int
    limits: Limits


class Roster:
    """Children of the next level, and after them those that run plain Python (`subs`)."""

    def __init__(self, children: Sequence[Child], subs: Sequence[Child]) -> None:
        self._children, self._subs = tuple(children), tuple(subs)
        self.members: list[Member] = []

    def start(self, calls: Calls) -> None:
        """Start all at once; raises what the first to fail raises, or ConfigError where two have one name.

        Who has started until then is a member, closed with the others; who starts later is closed by itself.
        """
        starts = [_begin(child, calls) for child in (*self._children, *self._subs)]
        try:
            wait(starts, return_when=FIRST_EXCEPTION)
        finally:  # also where the wait is interrupted
            ready = [start for start in starts if start.done()]
            for start in starts:
                if start not in ready:
                    start.add_done_callback(_close)
            failed = [error for start in ready if (error := start.exception()) is not None]
            self.members = [Member(start.result()) for start in ready if start.exception() is None]
        if failed:
            raise failed[0]
        names = [member.name for member in self.members]
        if len(set(names)) < len(names):
            raise ConfigError("children", names, "names of their own")

    def close(self, deadline: float) -> None:
        """Close all at once, within `deadline` seconds."""
        until = now() + deadline
        closers = [
            threading.Thread(target=member.endpoint.close, args=(deadline,), daemon=True)
            for member in self.members
        ]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join(max(until - now(), 0.0) + _GRACE)

    @property
    def healthy(self) -> bool:
        """Whether all are started, and none is gone."""
        alive = [member.alive(member.endpoint.generation) for member in self.members]
        return bool(alive) and all(alive)

    @property
    def runs_here(self) -> bool:
        """Whether the calling thread does the tasks of one of them."""
        return any(getattr(member.endpoint, "runs_here", False) for member in self.members)

    def contexts(self, level: int, limits: Limits) -> tuple[Context, ...]:
        """Describe each; `level` is theirs."""
        return tuple(
            Context(
                member.name,
                getattr(member.endpoint, "device", member.name),
                member.endpoint.generation,
                level,
                getattr(member.endpoint, "pid", None),
                len(member.memory.buffers(member.endpoint.generation)),
                limits,
            )
            for member in self.members
        )

    def child(self, number: int) -> Member:
        """Return a child of the next level; a HandleError where there is none of this number."""
        count = len(self._children)
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < count:
            raise HandleError("worker", number, f"0 to {count - 1}")
        return self.members[number]

    def sub(self, number: int) -> Member:
        """Return a plain Python child; a HandleError where there is none of this number."""
        if not 0 <= number < len(self._subs):
            raise HandleError("sub", number, f"one of the {len(self._subs)} plain Python children")
        return self.members[len(self._children) + number]

    def named(self, name: str) -> Member:
        """Return the one of this name, or raise HandleError."""
        for member in self.members:
            if member.name == name:
                return member
        raise HandleError("worker", name, "one of " + ", ".join(m.name for m in self.members))


def _begin(child: Child, calls: Calls) -> Future[Endpoint]:
    """Start one on a thread of its own, which keeps nobody from ending."""
    start: Future[Endpoint] = Future()

    def run() -> None:
        try:
            start.set_result(child(calls))
        except BaseException as error:
            start.set_exception(error)

    threading.Thread(target=run, name="piecework-start", daemon=True).start()
    return start


def _close(start: Future[Endpoint]) -> None:
    """Close what started after another one had failed to."""
    if start.exception() is None:
        start.result().close(_GRACE)
