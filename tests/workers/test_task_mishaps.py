"""What goes wrong between submission and run: refused tasks, changed tensors, code that exits or nests."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
from worker_rig import ADD, DOUBLE, DOUBLE_INTO, FUNCTIONS, GROW, IN, Gate, numbers, recording_worker

from piecework.errors import ConfigError, PieceworkError, WorkerError
from piecework.workers.process.endpoint import ProcessEndpoint
from piecework.workers.tasks.arguments import Allocate, TaskArgs
from piecework.workers.tasks.deferred import TensorIds
from piecework.workers.tasks.functions import Function
from piecework.workers.tasks.handles import HandleError
from piecework.workers.tasks.inline import inline
from piecework.workers.tasks.limits import CapacityError, Limits
from piecework.workers.tasks.nested import Nested
from piecework.workers.tasks.plans import PlanError
from piecework.workers.tasks.worker import Worker

F32 = torch.float32
FOUR = Allocate((4,), F32)


def read(worker: Worker, tensor: torch.Tensor, **how: bool) -> list[float]:
    found = torch.empty_like(tensor)
    worker.copy_from(worker.defer(tensor, **how), found)
    return found.tolist()


def test_a_refused_task_has_not_written_its_outputs() -> None:
    """What it would have written is uploaded by whoever reads it next, and not taken for new."""
    gate, limits = Gate(), Limits(dep_pool=(1,) * 4, timeout=0.05)
    worker, _ = recording_worker(3, functions=(*FUNCTIONS, gate.function), limits=limits)
    x, y = worker.malloc((4,), F32), torch.full((4,), 9.0)
    with worker.orchestrate():
        worker.submit_next_level(gate.function, TaskArgs(x=x))
        worker.submit_next_level(GROW, TaskArgs(x=x, amount=1.0))
        with pytest.raises(CapacityError, match="dep-pool"):
            worker.submit_next_level(DOUBLE_INTO, TaskArgs(x=x, y=worker.defer(y)))
        gate.opened.set()
    assert read(worker, y) == [9, 9, 9, 9]
    worker.close()


def test_a_refused_task_leaves_what_was_there() -> None:
    """A cache that only tasks fill is still full when the ring was too small for one of them."""
    worker, _ = recording_worker(3, limits=Limits(task_window=(2,) * 4, timeout=0.05))
    cache, x = torch.zeros(4), numbers()
    where = worker.defer(cache, upload=False)
    worker.run_next_level(DOUBLE_INTO, TaskArgs(x=worker.defer(x), y=where))
    with pytest.raises(CapacityError, match="task-window"), worker.orchestrate():
        for _ in range(2):
            worker.submit_next_level(GROW, TaskArgs(x=worker.defer(x), amount=0.0))
        worker.submit_next_level(GROW, TaskArgs(x=where, amount=1.0))
    assert read(worker, cache, upload=False) == [2, 4, 6, 8]
    worker.close()


def test_a_deferred_tensor_is_what_it_is_when_it_is_used() -> None:
    worker, record = recording_worker(3)
    x, found = numbers(), torch.empty(4)
    once = worker.defer(x)
    worker.copy_from(once, found)
    x.add_(1)
    worker.copy_from(once, found)
    assert found.tolist() == [2, 3, 4, 5]
    worker.copy_from(once, found)
    assert record.names().count("copy_to") == 2, "and goes up only when it changed"
    worker.close()


def test_values_that_are_not_in_memory_are_refused() -> None:
    """A lazy conjugate has the bytes of what it is a conjugate of."""
    worker, _ = recording_worker(3)
    lazy = torch.tensor([1 + 2j, 3 - 1j]).conj()
    for tensor in (lazy, lazy.imag):
        assert tensor.is_contiguous() == (tensor is lazy)
        with pytest.raises(HandleError, match=r"conjugate|contiguous"):
            worker.defer(tensor)
    handle = worker.malloc((2,), torch.complex64)
    with pytest.raises(HandleError, match="conjugate"):
        worker.copy_to(handle, lazy)
    worker.copy_to(handle, lazy.resolve_conj())
    worker.close()


@pytest.mark.parametrize("shape", [(2.0,), ("a",), (True,), (2**62,), (2**70,), (0,), (-1,)])
def test_sizes_that_can_not_be_are_refused_by_name(shape: tuple[int, ...]) -> None:
    worker, record = recording_worker(3)
    with pytest.raises(HandleError, match="shape="):
        worker.malloc(shape, F32)
    assert record.names() == []
    worker.close()


def test_a_plan_gives_back_what_nobody_freed_and_is_dropped_once() -> None:
    worker, record = recording_worker(3)
    x, found = numbers(), torch.empty(4)
    with worker.record([x]) as recording:
        args = TaskArgs(x=worker.defer(x), y=FOUR)
        freed = worker.submit_next_level(DOUBLE, args)["y"]
        kept = worker.submit_next_level(ADD, TaskArgs(x=freed, y=FOUR, amount=1.0))["y"]
        worker.copy_from(kept, found)
    plan = recording.plan
    worker.free(freed)
    plan.drop()
    plan.drop()
    assert record.names().count("free") == 2
    with pytest.raises(PlanError, match="it was dropped"):
        plan.run()
    worker.close()


def test_a_task_that_exits_fails_and_nobody_else() -> None:
    def leave(x: torch.Tensor) -> None:
        sys.exit(3)

    function = Function.of(leave, "leave", x=IN)
    worker = Worker(3, [inline(name="a")], functions=[function]).start()
    with pytest.raises(WorkerError, match="SystemExit: 3"):
        worker.run_next_level(function, TaskArgs(x=worker.defer(numbers())))
    worker.close()


def test_a_task_that_would_wait_for_itself_is_refused() -> None:
    upper: list[Worker] = []

    def again(x: torch.Tensor) -> None:
        upper[0].malloc((1,), F32)

    def lower(worker: Worker, x: torch.Tensor) -> None:
        worker.run_next_level(task, TaskArgs(x=worker.defer(x)))

    task = Function.of(again, "again", x=IN)
    down = Function.of(lower, "lower", skip=1, x=IN)
    below = Worker(3, [inline(name="a")], functions=[task])

    def refused(worker: Worker, function: Function) -> None:
        upper[:] = [worker.start()]
        ended: list[BaseException] = []

        def run() -> None:
            try:
                worker.run_next_level(function, TaskArgs(x=worker.defer(numbers())))
            except PieceworkError as error:
                ended.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(20)
        worker.close(1.0)
        thread.join(20)
        assert ["can't orchestrate" in str(error) for error in ended] == [True]

    refused(Worker(3, [inline(name="b")], functions=[task]), task)
    refused(Worker(4, [Nested(below, "n")], functions=[down]), down)


def test_an_interrupt_of_a_launch_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, _ = recording_worker(3, limits=Limits(task_window=(2,) * 4, timeout=0.05))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    member = worker._roster.members[0]
    x = worker.malloc((4,), F32)
    with monkeypatch.context() as patch:
        patch.setattr(member.endpoint, "run", interrupted)
        for source in (x, worker.defer(numbers())):  # at its submission, and when the upload is there
            with pytest.raises(KeyboardInterrupt):
                worker.run_next_level(DOUBLE, TaskArgs(x=source, y=FOUR))
    x = worker.defer(numbers())
    worker.run_next_level(DOUBLE, TaskArgs(x=x, y=FOUR))
    worker.close()


def test_any_thread_may_defer_while_another_looks_for_what_is_gone() -> None:
    ids, errors = TensorIds(), []
    over = threading.Event()
    shared = [torch.empty(1) for _ in range(300)]
    found: list[list[int]] = []

    def defer() -> None:
        found.append([ids.defer(tensor).id for tensor in shared])
        while not over.is_set():
            for _ in range(100):
                ids.defer(torch.empty(1))

    def look() -> None:
        try:
            for _ in range(500):
                ids.expired()
        except RuntimeError as error:
            errors.append(error)
        over.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=one) for one in (defer, defer, look)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert errors == [] and found[0] == found[1]


def test_a_function_of_the_main_program_is_refused_before_a_child_is_started() -> None:
    def scale() -> None: ...

    scale.__module__, scale.__qualname__ = "__main__", "scale"
    sys.modules["__main__"].scale = scale  # type: ignore[attr-defined]
    try:
        with pytest.raises(ConfigError, match="not of __main__"):
            ProcessEndpoint("a", {"digest": scale})
    finally:
        del sys.modules["__main__"].scale  # type: ignore[attr-defined]


def test_contexts_name_the_device() -> None:
    worker = Worker(3, [inline("sim", "a"), inline("cpu", "b")], functions=FUNCTIONS).start()
    assert [(one.name, one.device) for one in worker.contexts] == [("a", "sim"), ("b", "cpu")]
    worker.close()
