"""Workers run tasks in the order of their bytes; levels, groups, scopes, failures, limits."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
import torch
from worker_rig import (
    ADD,
    ADD_INTO,
    DOUBLE,
    DOUBLE_INTO,
    FAIL,
    FAIL_INTO,
    FUNCTIONS,
    GROW,
    IN,
    INOUT,
    OUT,
    Gate,
    endpoint_of,
    numbers,
    recording_worker,
)

from piecework.devices import make_device
from piecework.errors import ConfigError, DeviceError, ModelError, PieceworkError, WorkerLostError
from piecework.workers.endpoint import Endpoint
from piecework.workers.tasks.arguments import Allocate, TaskArgs
from piecework.workers.tasks.functions import Function
from piecework.workers.tasks.handles import HandleError
from piecework.workers.tasks.inline import InlineEndpoint, inline
from piecework.workers.tasks.limits import CapacityError, Limits
from piecework.workers.tasks.members import Calls, Child
from piecework.workers.tasks.nested import Nested
from piecework.workers.tasks.tags import Tag
from piecework.workers.tasks.worker import Worker

F32 = torch.float32
FOUR = Allocate((4,), F32)


def test_levels() -> None:
    with pytest.raises(ConfigError, match="level=5 is not allowed: one of 2, 3, 4"):
        Worker(5, [inline()])
    with pytest.raises(ConfigError, match="workers of level 3"):
        Worker(4, [inline()])
    with Worker(2, functions=FUNCTIONS) as chip:
        with chip.orchestrate(), pytest.raises(ConfigError, match="submit_next_level"):
            chip.submit_next_level(DOUBLE, TaskArgs(x=chip.defer(numbers()), y=FOUR))
        kept = chip.malloc((4,), F32)
        args = TaskArgs(x=chip.defer(numbers()), y=kept)
        chip.run_next_level(DOUBLE_INTO, args)  # falls back to `run`
        found = torch.empty(4)
        chip.copy_from(kept, found)
        assert found.tolist() == [2, 4, 6, 8]
        assert chip.contexts[0].level == 2
    with Worker(3, [inline()]) as node, pytest.raises(ConfigError, match="run_next_level"):
        node.run(DOUBLE_INTO, args)


def test_nothing_before_the_start_and_nothing_after_the_close() -> None:
    worker = Worker(3, [inline()], functions=FUNCTIONS)
    with pytest.raises(PieceworkError, match="not started"):
        worker.malloc((4,), F32)
    worker.start()
    late = Function.of(lambda x: None, "late", x=IN)
    with pytest.raises(PieceworkError, match="comes after the start"):
        worker.functions.register(late)
    with worker.orchestrate(), pytest.raises(PieceworkError, match="not registered"):
        worker.submit_next_level(late, TaskArgs(x=worker.defer(numbers())))
    with pytest.raises(PieceworkError, match="orchestrate"):
        worker.submit_next_level(DOUBLE, TaskArgs(x=worker.defer(numbers()), y=FOUR))
    worker.close()
    worker.close()
    with pytest.raises(PieceworkError, match="closed"):
        worker.malloc((4,), F32)


def test_a_copy_back_waits_for_its_kernel_on_another_worker_too() -> None:
    gate = Gate()
    worker, record = recording_worker(3, 2, (*FUNCTIONS, gate.function))
    x, host = numbers(), torch.zeros(4)
    with worker.orchestrate():
        cell = worker.malloc((4,), F32)
        worker.copy_to(cell, x)
        worker.submit_next_level(gate.function, TaskArgs(x=cell))
        worker.copy_from(cell, host)
        other = worker.submit_next_level(DOUBLE, TaskArgs(x=worker.defer(host), y=FOUR), worker=1)
        threading.Timer(0.05, gate.opened.set).start()
        back = torch.empty(4)
        worker.copy_from(other["y"], back)
    assert host.tolist() == [2, 3, 4, 5]
    assert back.tolist() == [4, 6, 8, 10]
    assert record.names("w0") == ["malloc", "copy_to", "run", "copy_from"]
    worker.close()


def test_tags_come_from_the_declaration_and_values_are_checked() -> None:
    by_place = Function.of(lambda a, b, c: None, "by place", c=IN, a=OUT)
    assert [p.tag for p in by_place.parameters] == [OUT, None, IN]
    assert by_place.digest != Function.of(lambda a, b, c: None, "by place", c=INOUT, a=OUT).digest
    assert by_place.digest == Function.of(lambda a, b, c: None, "by place", c=IN, a=OUT).digest
    with pytest.raises(ConfigError, match=r"d=.*a parameter of"):
        Function.of(lambda a: None, "x", d=IN)
    with pytest.raises(ConfigError, match="content"):
        Function.of(lambda a: by_place, a=IN)  # what it closes over isn't in its code
    x = torch.ones(4)
    with Worker(3, [inline()], functions=FUNCTIONS) as worker, worker.orchestrate():
        deferred = worker.defer(x)
        for args, message in (
            (TaskArgs(x=deferred, y=FOUR), "amount=None"),
            (TaskArgs(x=deferred, y=FOUR, amount=1.0, z=2), "z=2"),
            (TaskArgs(x=deferred, y=deferred, amount=1.0), "y=.*Allocate"),
            (TaskArgs(x=x, y=FOUR, amount=1.0), "x='Tensor'.*defer"),  # type: ignore[arg-type]
            (TaskArgs(x=deferred, y=FOUR, amount=deferred), "amount=.*number"),
        ):
            with pytest.raises(HandleError, match=message):
                worker.submit_next_level(ADD, args)


def test_a_failure_takes_its_descendants_and_no_one_else() -> None:
    worker, record = recording_worker(3, 1)
    alone, host = torch.zeros(4), torch.full((4,), -1.0)
    with pytest.raises(ValueError, match="planned") as caught, worker.orchestrate():
        x = worker.defer(numbers())
        bad = worker.submit_next_level(FAIL, TaskArgs(x=x, y=FOUR))["y"]
        after = worker.submit_next_level(DOUBLE, TaskArgs(x=bad, y=FOUR))["y"]
        worker.copy_from(after, host)
        good = worker.submit_next_level(ADD, TaskArgs(x=x, y=FOUR, amount=1.0))["y"]
        worker.copy_from(good, alone)
        also = worker.malloc((4,), F32)
        worker.submit_next_level(FAIL_INTO, TaskArgs(x=x, y=also))
        worker.submit_next_level(ADD_INTO, TaskArgs(x=good, y=also, amount=0.0))  # overwrites what failed
        kept = torch.zeros(4)
        worker.copy_from(also, kept)
    notes = "\n".join(caught.value.__notes__)
    assert "in task 1 (_fail on w0)" in notes
    assert "did not run: task 2 (_double on w0), which needs what task 1 (_fail on w0) makes" in notes
    assert "did not run: copy from w0" in notes
    assert "also failed: task 4 (_fail on w0): ValueError: planned" in notes
    assert alone.tolist() == kept.tolist() == [2, 3, 4, 5]
    assert host.tolist() == [-1] * 4, "a poisoned copy left the host tensor alone"
    assert record.names().count("malloc") - record.names().count("free") == 2  # `also` and the upload
    worker.run_next_level(ADD_INTO, TaskArgs(x=worker.defer(numbers()), y=also, amount=2.0))
    worker.copy_from(also, kept)
    assert kept.tolist() == [3, 4, 5, 6], "the worker goes on"
    worker.close()


def test_a_failed_reader_is_only_waited_for() -> None:
    with Worker(3, [inline()], functions=FUNCTIONS) as worker:
        cell, found = worker.malloc((4,), F32), torch.empty(4)
        worker.copy_to(cell, numbers())
        with pytest.raises(ValueError, match="planned"), worker.orchestrate():
            worker.submit_next_level(FAIL, TaskArgs(x=cell, y=FOUR))
            worker.submit_next_level(GROW, TaskArgs(x=cell, amount=1.0))
            worker.copy_from(cell, found)
        assert found.tolist() == [2, 3, 4, 5]


def test_an_error_in_the_body_is_the_error_and_what_was_submitted_is_finished() -> None:
    with Worker(3, [inline()], functions=FUNCTIONS) as worker:
        found = torch.empty(4)
        with pytest.raises(KeyError) as caught, worker.orchestrate():
            worker.submit_next_level(FAIL, TaskArgs(x=worker.defer(numbers()), y=FOUR))
            good = worker.submit_next_level(DOUBLE, TaskArgs(x=worker.defer(numbers()), y=FOUR))
            worker.copy_from(good["y"], found)
            raise KeyError("mine")
        assert found.tolist() == [2, 4, 6, 8]
        assert "a task had failed before: ValueError: planned, after (4,)" in caught.value.__notes__
        with worker.orchestrate(), pytest.raises(PieceworkError, match="orchestrates already"):
            worker.orchestrate().__enter__()


def test_a_group_starts_together_or_not_at_all() -> None:
    meeting = threading.Barrier(2, timeout=20)

    def meet(x: torch.Tensor, y: torch.Tensor) -> None:
        meeting.wait()  # passes only if the other member runs at the same time
        y.copy_(x)

    function = Function.of(meet, "meet", x=IN, y=OUT)
    worker, record = recording_worker(3, 2, (*FUNCTIONS, function))
    x = worker.defer(numbers())
    with worker.orchestrate():
        made = worker.submit_group(function, [TaskArgs(x=x, y=FOUR)] * 2, [0, 1])
        assert [one["y"].worker for one in made] == ["w0", "w1"]
    assert record.names().count("run") == 2
    record.operations.clear()
    with pytest.raises(ValueError, match="planned"), worker.orchestrate():
        bad = worker.submit_next_level(FAIL, TaskArgs(x=x, y=FOUR), worker=1)["y"]
        worker.submit_group(function, [TaskArgs(x=x, y=FOUR), TaskArgs(x=bad, y=FOUR)], [0, 1])
    assert record.names("w0").count("run") == 0, "one poisoned member keeps the others"
    record.operations.clear()
    with worker.orchestrate(), pytest.raises(HandleError, match="worker='w0'"):
        own = worker.malloc((4,), F32, 0)
        worker.submit_group(function, [TaskArgs(x=x, y=FOUR), TaskArgs(x=own, y=FOUR)], [0, 1])
    assert record.names() == ["malloc"], "a refused member keeps all from being allocated or started"
    with worker.orchestrate(), pytest.raises(ConfigError, match="different ones"):
        worker.submit_group(function, [TaskArgs(x=x, y=FOUR)] * 2, [1, 1])
    worker.close()


def test_a_member_that_is_gone_keeps_its_group_from_starting() -> None:
    gate = Gate()
    worker, record = recording_worker(3, 2, (*FUNCTIONS, gate.function))
    with pytest.raises(WorkerLostError, match="w1"), worker.orchestrate():
        here, there = worker.malloc((4,), F32, 0), worker.malloc((4,), F32, 1)
        worker.submit_next_level(gate.function, TaskArgs(x=here))
        worker.submit_group(GROW, [TaskArgs(x=x, amount=1.0) for x in (here, there)], [0, 1])
        assert gate.entered.wait(20)
        endpoint_of(worker, 1).die()
        with pytest.raises(WorkerLostError):
            worker.malloc((4,), F32, 1)  # now it is known
        gate.opened.set()
    assert record.names("w0").count("run") == 1, "the gate alone"
    worker.close()


def test_children_start_together_and_a_failure_is_told_at_once() -> None:
    meeting, closed = threading.Barrier(2, timeout=20), threading.Event()

    def child(name: str) -> Child:
        def start(calls: Calls) -> Endpoint:
            meeting.wait()  # passes only if another one starts at the same time
            return inline(name=name)(calls)

        return start

    with Worker(3, [child("a"), child("b")], functions=FUNCTIONS) as worker:
        assert [context.name for context in worker.contexts] == ["a", "b"]

    held = threading.Event()

    class Late(InlineEndpoint):
        def close(self, deadline: float) -> None:
            super().close(deadline)
            closed.set()

    def slow(calls: Calls) -> Endpoint:
        assert held.wait(20)
        return Late("slow", calls, make_device("cpu"))

    def broken(calls: Calls) -> Endpoint:
        raise ModelError("planned")

    with pytest.raises(ModelError, match="planned"):
        Worker(3, [slow, broken], functions=FUNCTIONS).start()
    assert not closed.is_set(), "it has not started yet"
    held.set()
    assert closed.wait(20), "who starts too late is closed"


def test_outputs_live_as_long_as_their_scope() -> None:
    worker, record = recording_worker(3)
    with worker.orchestrate():
        x = worker.defer(numbers())
        with worker.scope():
            inner = worker.submit_next_level(DOUBLE, TaskArgs(x=x, y=FOUR))["y"]
            stays = worker.submit_next_level(DOUBLE, TaskArgs(x=inner, y=FOUR))["y"]
            worker.keep(stays)
        with pytest.raises(HandleError, match=f"id={inner.id}.*its scope ended"):
            worker.submit_next_level(DOUBLE, TaskArgs(x=inner, y=FOUR))
        outer = worker.submit_next_level(ADD, TaskArgs(x=stays, y=FOUR, amount=1.0))["y"]
        worker.free(outer)
        with pytest.raises(HandleError, match="it was freed"):
            worker.free(outer)
    assert [detail for _, name, detail in record.operations if name == "free"] == [inner.id, outer.id]
    found = torch.empty(4)
    worker.copy_from(stays, found)
    assert found.tolist() == [4, 8, 12, 16], "an output that was kept is there for the next program"
    worker.close()


@pytest.mark.parametrize(
    ("limits", "resource", "used", "wanted", "knob"),
    [
        (Limits.parse("64", "100", "100"), "heap", 64, 16, "--ring-heap"),
        (Limits.parse("1M", "4", "100"), "task-window", 4, 1, "--ring-task-window"),
        (Limits.parse("1M", "100", "2,9,9,9"), "dep-pool", 2, 1, "--ring-dep-pool"),
    ],
)
def test_a_ring_too_small_is_a_typed_error_and_the_worker_goes_on(
    limits: Limits, resource: str, used: int, wanted: int, knob: str
) -> None:
    gate = Gate()
    worker, record = recording_worker(3, 1, (*FUNCTIONS, gate.function), limits=limits)
    cell = worker.malloc((4,), F32)
    worker.copy_to(cell, numbers())

    def step(tasks: int) -> None:
        with worker.orchestrate():
            worker.submit_next_level(gate.function, TaskArgs(x=cell))
            made = cell
            for _ in range(tasks):
                made = worker.submit_next_level(DOUBLE, TaskArgs(x=made, y=FOUR))["y"]

    threading.Timer(0.05, gate.opened.set).start()
    with pytest.raises(CapacityError) as caught:
        step(6)
    error = caught.value
    assert (error.resource, error.ring, error.used, error.wanted) == (resource, 0, used, wanted)
    assert (error.limit, error.knob) == (limits.of(resource)[0], knob)
    assert all(str(part) in str(error) for part in (resource, "ring 0", used, limits.of(resource)[0], knob))
    step(1)
    assert worker.high_water[resource][0] == used
    assert record.names().count("malloc") - 1 == record.names().count("free")
    worker.close()


def test_scopes_make_room_and_a_full_ring_waits_for_it() -> None:
    gate = Gate()
    limits = Limits.parse("1M,16,1M,1M", "1000", "1000")
    worker, _ = recording_worker(3, 1, (*FUNCTIONS, gate.function), limits=limits)
    threading.Timer(0.05, gate.opened.set).start()
    with worker.orchestrate():
        cell = worker.malloc((4,), F32)
        worker.copy_to(cell, numbers())
        worker.submit_next_level(gate.function, TaskArgs(x=cell))
        for _ in range(3):  # each needs the 16 bytes that the one before still holds
            with worker.scope():
                made = worker.submit_next_level(DOUBLE, TaskArgs(x=cell, y=FOUR))["y"]
                worker.submit_next_level(DOUBLE_INTO, TaskArgs(x=made, y=cell))
        found = torch.empty(4)
        worker.copy_from(cell, found)
    assert found.tolist() == [value * 64 for value in (2, 3, 4, 5)]
    assert worker.high_water["heap"][:2] == [0, 16]
    worker.close()


def test_limits_are_read_from_one_value_or_four() -> None:
    assert Limits.parse("4GiB", "1048576", 7).heap == (4 * 2**30,) * 4
    assert Limits.parse("4GiB", "8,4,2,1", 7).task_window == (8, 4, 2, 1)
    for value in ("1,2", "-1", "0", "x", ""):
        with pytest.raises(ConfigError, match="ring_heap"):
            Limits.parse(value, 1, 1)


def test_nothing_is_freed_on_a_dead_worker_and_its_handles_are_refused() -> None:
    worker, record = recording_worker(3, 2)
    cell = worker.malloc((4,), F32)
    endpoint = endpoint_of(worker)
    host = numbers()
    x = worker.defer(host)
    worker.run_next_level(ADD_INTO, TaskArgs(x=x, y=cell, amount=1.0))
    with pytest.raises(DeviceError, match="w0 died"), worker.orchestrate():
        made = worker.submit_next_level(DOUBLE, TaskArgs(x=x, y=FOUR))["y"]
        endpoint.die()
        worker.submit_next_level(DOUBLE_INTO, TaskArgs(x=made, y=cell))
        fine = worker.submit_next_level(DOUBLE, TaskArgs(x=x, y=FOUR), worker=1)["y"]
        other = torch.empty(4)
        worker.copy_from(fine, other)
    assert other.tolist() == [2, 4, 6, 8], "the other worker was not held up"
    assert "free" not in record.names("w0")
    assert "free" in record.names("w1")
    with pytest.raises(DeviceError, match="w0 died, and was not started again"):
        worker.malloc((4,), F32)
    endpoint.die(restart=True)
    with pytest.raises(HandleError, match="generation=0 is not allowed: 1"):
        worker.copy_to(cell, numbers())
    with worker.orchestrate():
        worker.submit_next_level(DOUBLE, TaskArgs(x=x, y=FOUR))
    assert record.names("w0")[-5:] == ["malloc", "copy_to", "malloc", "run", "free"], "uploaded again"
    worker.close()


def test_a_hung_child_does_not_block_close_and_its_run_ends() -> None:
    gate = Gate()
    worker = Worker(3, [inline(name="a"), inline(name="b")], functions=[gate.function]).start()
    cell = worker.malloc((1,), F32)
    ended: list[BaseException] = []

    def run() -> None:
        try:
            worker.run_next_level(gate.function, TaskArgs(x=cell))
        except DeviceError as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert gate.entered.wait(20)
    worker.close(deadline=0.05)
    thread.join(20)
    assert [str(error) for error in ended] == ["the worker a did not end in 0.05 s"]
    gate.opened.set()


def test_a_level_4_worker_has_workers_below_it() -> None:
    inner = Function.of(lambda x, y: y.copy_(x * 3), "triple", x=IN, y=Tag.OUTPUT_EXISTING)

    def step(worker: Worker, x: torch.Tensor, y: torch.Tensor) -> None:
        with worker.orchestrate():
            for child in range(2):  # each does half
                rows = slice(child * 2, child * 2 + 2)
                half = worker.defer(y[rows], upload=False)
                worker.submit_next_level(inner, TaskArgs(x=worker.defer(x[rows]), y=half), child)
                worker.copy_from(half, y[rows], child)

    outer = Function.of(step, "step", skip=1, x=IN, y=OUT)
    nodes = [Worker(3, [inline(name=f"{n}0"), inline(name=f"{n}1")], functions=[inner]) for n in ("a", "b")]
    top = Worker(4, [Nested(node, name) for node, name in zip(nodes, "ab", strict=True)], functions=[outer])
    with top, top.orchestrate():
        found = [torch.empty(4), torch.empty(4)]
        for number in range(2):
            x = top.defer(numbers(start=number))
            made = top.submit_next_level(outer, TaskArgs(x=x, y=FOUR), number)["y"]
            top.copy_from(made, found[number])
    assert [one.tolist() for one in found] == [[0, 3, 6, 9], [3, 6, 9, 12]]
    with pytest.raises(PieceworkError, match="closed"):
        nodes[0].malloc((1,), F32)


def test_sub_children_run_plain_python() -> None:
    worker = Worker(3, [inline(name="chip")], subs=[inline(name="host")], functions=FUNCTIONS).start()
    found = torch.empty(4)
    with worker.orchestrate():
        made = worker.submit_sub(DOUBLE, TaskArgs(x=worker.defer(numbers()), y=FOUR))["y"]
        assert made.worker == "host"
        worker.copy_from(made, found)
        with pytest.raises(HandleError, match="sub=1"):
            worker.submit_sub(DOUBLE, TaskArgs(x=worker.defer(numbers()), y=FOUR), sub=1)
        with pytest.raises(HandleError, match="worker=1 is not allowed: 0 to 0"):
            worker.submit_next_level(DOUBLE, TaskArgs(x=worker.defer(numbers()), y=FOUR), worker=1)
    assert found.tolist() == [2, 4, 6, 8]
    assert [context.name for context in worker.contexts] == ["chip", "host"]
    worker.close()


def test_the_example_of_the_page_runs_as_written(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[2] / "docs" / "worker-tasks.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(code, page.name, "exec"), {})
    (said,) = re.findall(r"print\(.*\)  # (.*)", code)
    assert capsys.readouterr().out.strip() == said
