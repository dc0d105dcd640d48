"""Random tasks over overlapping bytes give what running them one after the other gives."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from piecework.devices import make_device
from piecework.errors import PieceworkError
from piecework.workers.endpoint import Endpoint, Region, Scalar
from piecework.workers.tasks.arguments import TaskArgs, Value
from piecework.workers.tasks.functions import Function
from piecework.workers.tasks.handles import Handle
from piecework.workers.tasks.inline import InlineEndpoint, inline
from piecework.workers.tasks.members import Calls, Child
from piecework.workers.tasks.ranges import RangeMap
from piecework.workers.tasks.tags import Tag
from piecework.workers.tasks.worker import Worker

CELLS, BUFFERS, WORKERS = 12, 2, 2


class Planned(PieceworkError):
    """A task that is to fail."""


def _mix(number: int, fails: bool, first: Tensor, second: Tensor, kinds: str) -> None:
    """Read what is read, change or overwrite what is written; the result depends on every read value."""
    if fails:
        raise Planned(f"task {number}")
    tensors = list(zip((first, second), kinds.split(), strict=True))
    seen = sum(float((t * torch.arange(1, len(t) + 1)).sum()) for t, k in tensors if k in ("input", "inout"))
    for tensor, kind in tensors:
        if kind == "inout":
            tensor.mul_(2).add_(seen + number).remainder_(1009)
        elif kind == "output_existing":
            tensor.copy_((torch.arange(len(tensor)) * 3 + seen + number) % 1009)


KINDS = (Tag.INPUT, Tag.INOUT, Tag.OUTPUT_EXISTING)
MIXES = {(a, b): Function.of(_mix, first=a, second=b) for a in KINDS for b in KINDS}


class Shuffled(InlineEndpoint):
    """Answers late, and out of order: nothing but the graph may order tasks."""

    def __init__(self, name: str, calls: Calls, later: Sequence[int]) -> None:
        super().__init__(name, calls, make_device("cpu"))
        self._later = list(later)
        self._held: list[Future[None]] = []

    def run(self, digest: str, arguments: Sequence[Scalar | Region]) -> Future[None]:
        """Do it on a thread of its own after a while, so that tasks of one worker overlap too."""
        import threading

        wait = self._later.pop() / 2000 if self._later else 0
        future: Future[None] = Future()

        def work() -> None:
            try:
                self._call(self._calls[digest], arguments)
            except PieceworkError as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        threading.Timer(wait, work).start()
        return future


def shuffled(name: str, later: Sequence[int]) -> Child:
    """A child that doesn't keep the order by itself."""

    def start(calls: Calls) -> Endpoint:
        return Shuffled(name, calls, later)

    return start


Task = tuple[int, int, int, int, int, int, Tag, Tag, bool]


@st.composite
def tasks(draw: st.DrawFn) -> Task:
    """A task: worker, two parts (buffer, start, length) of its buffers that don't overlap, tags, failure."""
    worker = draw(st.integers(0, WORKERS - 1))
    lengths = [draw(st.integers(1, 5)) for _ in range(2)]
    starts = [draw(st.integers(0, CELLS - length)) for length in lengths]
    buffers = (0, 1) if draw(st.booleans()) else (1, 0)
    tags = [draw(st.sampled_from(KINDS)) for _ in range(2)]
    return (
        worker,
        buffers[0],
        starts[0],
        lengths[0],
        starts[1],
        lengths[1],
        *tags,
        draw(st.integers(0, 3)) == 0,
    )


def _serially(work: Sequence[Task], moves: Sequence[tuple[int, int, int]]) -> tuple[list[Tensor], set[int]]:
    """What the buffers hold after all tasks in order; a failed task's descendants are left out."""
    buffers = [torch.arange(float(CELLS)) for _ in range(WORKERS * BUFFERS)]
    bad = [torch.zeros(CELLS, dtype=torch.bool) for _ in range(WORKERS * BUFFERS)]
    skipped: set[int] = set()
    for number, (worker, buffer, start, length, start2, length2, tag, tag2, fails) in enumerate(work):
        places = [
            (worker * BUFFERS + buffer, start, length),
            (worker * BUFFERS + 1 - buffer, start2, length2),
        ]
        parts = [slice(s, s + n) for _, s, n in places]
        tags = (tag, tag2)
        poisoned = any(
            t.reads and bool(bad[b][part].any())
            for (b, _, _), part, t in zip(places, parts, tags, strict=True)
        )
        if fails or poisoned:
            skipped.add(number)
        else:
            kinds = f"{tag.value} {tag2.value}"
            _mix(number, False, buffers[places[0][0]][parts[0]], buffers[places[1][0]][parts[1]], kinds)
        for (b, _, _), part, t in zip(places, parts, tags, strict=True):
            if t.writes:
                bad[b][part] = number in skipped
        for after, source, target in moves:
            if after == number:
                _move(buffers, bad, source, target)
    return buffers, skipped


def _move(buffers: list[Tensor], bad: list[Tensor], source: int, target: int) -> None:
    """A buffer goes through the host to another one, on whichever worker."""
    if bad[source].any():
        bad[target][:] = True
    else:
        buffers[target].copy_(buffers[source])
        bad[target][:] = False


@settings(max_examples=60, deadline=None)
@given(
    st.lists(tasks(), min_size=1, max_size=14),
    st.lists(st.tuples(st.integers(0, 13), st.integers(0, 3), st.integers(0, 3)), max_size=3),
    st.lists(st.integers(0, 4), min_size=14, max_size=14),
)
def test_random_graphs_give_the_result_of_serial_execution(
    work: list[Task], moves: list[tuple[int, int, int]], later: list[int]
) -> None:
    moves = sorted((after, a, b) for after, a, b in moves if a != b)
    wanted, skipped = _serially(work, moves)
    children = [shuffled(f"w{i}", later[i::WORKERS]) for i in range(WORKERS)]
    worker = Worker(3, children, functions=list(MIXES.values())).start()
    hosts = [torch.empty(CELLS) for _ in moves]
    try:
        cells: list[Handle] = []
        for number in range(WORKERS * BUFFERS):
            cells.append(worker.malloc((CELLS,), torch.float32, number // BUFFERS))
            worker.copy_to(cells[-1], torch.arange(float(CELLS)))
        try:
            with worker.orchestrate():
                for number, task in enumerate(work):
                    _submit(worker, cells, number, task)
                    for (after, source, target), host in zip(moves, hosts, strict=True):
                        if after == number:
                            worker.copy_from(cells[source], host)
                            worker.copy_to(cells[target], host)
        except Planned:
            assert skipped
        for cell, want in zip(cells, wanted, strict=True):
            found = torch.empty(CELLS)
            worker.copy_from(cell, found)
            assert found.tolist() == want.tolist()
    finally:
        worker.close()


def _submit(worker: Worker, cells: Sequence[Handle], number: int, task: Task) -> None:
    where, buffer, start, length, start2, length2, tag, tag2, fails = task
    first = cells[where * BUFFERS + buffer].view(start * 4, (length,))
    second = cells[where * BUFFERS + 1 - buffer].view(start2 * 4, (length2,))
    values: dict[str, Value] = {
        "number": number,
        "fails": fails,
        "first": first,
        "second": second,
        "kinds": f"{tag.value} {tag2.value}",
    }
    worker.submit_next_level(MIXES[tag, tag2], TaskArgs(values), where)


class _Node:
    finished = False


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(1, 12)), max_size=40))
def test_ranges_know_the_last_writer_and_the_readers_of_each_byte(
    accesses: list[tuple[bool, int, int]],
) -> None:
    ranges: RangeMap[_Node] = RangeMap()
    writer: list[_Node | None] = [None] * 50
    readers: list[set[_Node]] = [set() for _ in range(50)]
    for writes, start, length in accesses:
        stop = start + length
        assert set(ranges.writers(start, stop)) == {w for w in writer[start:stop] if w is not None}
        assert set(ranges.readers(start, stop)) == set().union(*readers[start:stop])
        node = _Node()
        if writes:
            ranges.write(start, stop, node)
            writer[start:stop] = [node] * length
            readers[start:stop] = [set() for _ in range(length)]
        else:
            ranges.read(start, stop, node)
            for byte in range(start, stop):
                readers[byte].add(node)


def test_no_dep_is_not_looked_at() -> None:
    """With the tag a task may run before one that writes what it reads; without it, never."""
    import threading

    order: list[str] = []
    opened = threading.Event()

    def write(x: Tensor) -> None:
        assert opened.wait(20)
        order.append("write")

    def look(x: Tensor) -> None:
        order.append("look")
        opened.set()

    writer = Function.of(write, "write", x=Tag.INOUT)
    looker = Function.of(look, "look", x=Tag.NO_DEP)
    child = inline(name="a"), inline(name="b")
    with Worker(3, child, functions=[writer, looker]) as worker, worker.orchestrate():
        host = torch.zeros(4)
        worker.submit_next_level(writer, TaskArgs(x=worker.defer(host)), 0)
        worker.submit_next_level(looker, TaskArgs(x=worker.defer(host)), 1)
    assert order == ["look", "write"]
