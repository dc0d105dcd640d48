"""Tasks, copies and plans do in child processes what they do in this one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch
from worker_rig import ADD, ADD_INTO, DOUBLE, FUNCTIONS, GROW, numbers

from piecework.errors import WorkerLostError
from piecework.workers.process.endpoint import ProcessEndpoint, process
from piecework.workers.tasks.arguments import Allocate, TaskArgs
from piecework.workers.tasks.plans import PlanError
from piecework.workers.tasks.worker import Worker

F32 = torch.float32


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    """Its first child is killed by the last test."""
    made = Worker(3, [process(name="a"), process(name="b")], functions=FUNCTIONS).start()
    yield made
    made.close()


def endpoint(worker: Worker, number: int) -> ProcessEndpoint:
    found = worker._roster.members[number].endpoint
    assert isinstance(found, ProcessEndpoint)
    return found


def test_a_result_goes_from_one_process_to_another_and_back(worker: Worker) -> None:
    """The children's names are where the tasks run; the way between them leads over this process."""
    x, host = numbers(), torch.empty(4)
    with worker.orchestrate():
        first = worker.submit_next_level(DOUBLE, TaskArgs(x=worker.defer(x), y=Allocate((4,), F32)), worker=0)
        between = torch.empty(4)
        worker.copy_from(first["y"], between)
        second = worker.malloc((4,), F32, worker=1)
        worker.copy_to(second, between)
        made = worker.submit_next_level(ADD, TaskArgs(x=second, y=Allocate((4,), F32), amount=0.5), worker=1)
        worker.copy_from(made["y"], host)
    assert host.tolist() == [2.5, 4.5, 6.5, 8.5]
    pids = {endpoint(worker, 0).pid, endpoint(worker, 1).pid, os.getpid()}
    assert len(pids) == 3 and None not in pids


def test_a_plan_is_one_message_to_a_process_and_ends_with_it(worker: Worker) -> None:
    x, host = numbers(), torch.empty(4)
    total = worker.malloc((4,), F32, worker=0)
    worker.copy_to(total, torch.zeros(4))

    def graph() -> None:
        made = worker.submit_next_level(DOUBLE, TaskArgs(x=worker.defer(x), y=Allocate((4,), F32)), worker=0)[
            "y"
        ]
        worker.submit_next_level(ADD_INTO, TaskArgs(x=made, y=total, amount=0.5), worker=0)
        worker.submit_next_level(GROW, TaskArgs(x=total, amount=1.0), worker=0)
        worker.copy_from(total, host)

    with worker.record([x]) as recording:
        graph()
    x.fill_(20.0)
    host.zero_()
    recording.plan.run()
    assert host.tolist() == [41.5] * 4
    pid = endpoint(worker, 0).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with pytest.raises((WorkerLostError, PlanError)):
        recording.plan.run()
