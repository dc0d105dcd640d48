"""The graph of tasks: who waits for whom, what runs, and what a failure takes with it.

It belongs to the one thread that submits. Workers answer through a queue, which that thread reads whenever
it submits or waits; so nothing here needs a lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from queue import Empty, SimpleQueue
from typing import Any

from piecework.workers.tasks.ranges import RangeMap
from piecework.workers.tasks.tags import Tag

Launch = Callable[[], Sequence[Future[None]]]


class State(Enum):
    """Where a task is. One is poisoned, and never runs, where it needs what a failed one didn't make."""

    WAITING = 0
    RUNNING = 1
    DONE = 2
    FAILED = 3
    POISONED = 4


@dataclass(frozen=True)
class Access:
    """Bytes from `start` to `stop` of one buffer, and what a task does to them."""

    buffer: Hashable
    start: int
    stop: int
    tag: Tag


class Node:
    """One task, copy or release. `launch` starts it, all members of a group together."""

    __slots__ = (
        "after",
        "errors",
        "keeps",
        "launch",
        "name",
        "open",
        "pending",
        "poison",
        "state",
        "waiters",
    )

    def __init__(self, name: str, launch: Launch, keeps: Sequence[Any] = ()) -> None:
        self.name = name
        self.launch = launch
        self.keeps = keeps  # what must live until it is done, such as host tensors
        self.state = State.WAITING
        self.pending = 0
        self.open = 0
        self.errors: list[BaseException] = []
        self.poison: Node | None = None
        self.waiters: list[tuple[Node, bool]] = []
        self.after: list[Callable[[], None]] = []

    @property
    def finished(self) -> bool:
        """Whether it will never run again; it may have failed."""
        return self.state not in (State.WAITING, State.RUNNING)

    @property
    def failed(self) -> bool:
        """Whether what it should have written is not there."""
        return self.state in (State.FAILED, State.POISONED)


class TaskGraph:
    """Runs nodes as soon as what they wait for is done.

    Two kinds of edges: one to the producer of data, which hands a failure on, and one that only keeps the
    order, to readers of what is overwritten and to writers whose bytes nobody needs any more.
    """

    def __init__(self) -> None:
        self._buffers: dict[Hashable, RangeMap[Node]] = {}
        self._answers: SimpleQueue[tuple[Node, BaseException | None]] = SimpleQueue()
        self.failures: list[Node] = []
        self.poisoned: list[Node] = []
        self.unfinished = 0

    def predecessors(self, accesses: Sequence[Access]) -> dict[Node, bool]:
        """Return whom a task with these accesses comes after, and whether it needs their data."""
        found: dict[Node, bool] = {}
        for access in accesses:
            ranges = self._buffers.get(access.buffer)
            if ranges is None or access.tag is Tag.NO_DEP:
                continue
            for writer in ranges.writers(access.start, access.stop):
                found[writer] = found.get(writer, False) or access.tag.reads
            if access.tag.writes:
                for reader in ranges.readers(access.start, access.stop):
                    found.setdefault(reader, False)
        return {node: data for node, data in found.items() if not node.finished or (data and node.failed)}

    def add(self, node: Node, accesses: Sequence[Access]) -> None:
        """Put a node after its predecessors, and start it if it has none that still run."""
        for before, data in self.predecessors(accesses).items():
            if before.finished:
                node.poison = before
            else:
                node.pending += 1
                before.waiters.append((node, data))
        for access in accesses:  # after the look-up: a task doesn't wait for itself
            if access.tag is not Tag.NO_DEP:
                ranges = self._buffers.setdefault(access.buffer, RangeMap())
                note = ranges.write if access.tag.writes else ranges.read
                note(access.start, access.stop, node)
        self.unfinished += 1
        self._run([node])

    def forget(self, buffer: Hashable) -> None:
        """Drop what is known of a buffer that is gone."""
        self._buffers.pop(buffer, None)

    def progress(self, timeout: float | None = 0.0) -> bool:
        """Take one answer, waiting `timeout` seconds (None: as long as it takes); False where none came."""
        try:
            node, error = self._answers.get(timeout=timeout) if timeout != 0 else self._answers.get_nowait()
        except Empty:
            return False
        if error is not None:
            node.errors.append(error)
        node.open -= 1
        if node.open == 0:
            self._run(self._finish(node))
        return True

    def drain(self) -> None:
        """Wait until everything that was submitted is done."""
        while self.unfinished:
            self.progress(None)

    def error(self) -> BaseException | None:
        """Return the first failure, with notes of its place, of later ones, and of what didn't run."""
        if not self.failures:
            return None
        first = self.failures[0].errors[0]
        first.add_note(f"in {self.failures[0].name}")
        for node in self.failures:
            for error in node.errors:
                if error is not first:
                    first.add_note(f"also failed: {node.name}: {type(error).__name__}: {error}")
        for node in self.poisoned:
            because = node.poison.name if node.poison else ""
            first.add_note(f"did not run: {node.name}, which needs what {because} makes")
        return first

    def _run(self, ready: Sequence[Node]) -> None:
        waiting = deque(ready)
        interrupt: BaseException | None = None
        while waiting:
            node = waiting.popleft()
            if node.pending or node.state is not State.WAITING:
                continue
            if node.poison is not None:
                node.state = State.POISONED
                self.poisoned.append(node)
                waiting.extend(self._finish(node))
                continue
            node.state = State.RUNNING
            try:
                futures = node.launch()
            except BaseException as error:  # what a worker refuses at once is a failure like a later one
                node.errors.append(error)
                futures = ()
                if not isinstance(error, Exception):  # Ctrl-C: nobody must wait for this node
                    interrupt = error
            node.open = len(futures)
            for future in futures:
                future.add_done_callback(self._answer_of(node))
            if not futures:
                waiting.extend(self._finish(node))
        if interrupt is not None:
            raise interrupt

    def _answer_of(self, node: Node) -> Callable[[Future[None]], None]:
        def answer(future: Future[None]) -> None:
            self._answers.put((node, future.exception()))

        return answer

    def _finish(self, node: Node) -> list[Node]:
        """Close a node; return those that waited for it."""
        self.unfinished -= 1
        if node.state is State.RUNNING:
            node.state = State.FAILED if node.errors else State.DONE
        if node.state is State.FAILED:
            self.failures.append(node)
        followers = []
        for follower, data in node.waiters:
            follower.pending -= 1
            if data and node.failed and follower.poison is None:
                follower.poison = node
            followers.append(follower)
        node.waiters, node.keeps = [], ()
        node.launch = _nothing
        for action in node.after:
            action()
        node.after = []
        return followers


def _nothing() -> Sequence[Future[None]]:
    return ()
