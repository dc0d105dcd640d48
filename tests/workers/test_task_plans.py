"""A recorded graph does what the graph does, in one message, and refuses to run when it can't."""

from __future__ import annotations

import pytest
import torch
from worker_rig import ADD_INTO, DOUBLE, DOUBLE_INTO, GROW, endpoint_of, numbers, recording_worker

from piecework.workers.tasks.arguments import Allocate, TaskArgs
from piecework.workers.tasks.plans import PlanError

F32 = torch.float32


def test_a_plan_gives_what_its_graph_gives_and_is_one_message() -> None:
    worker, record = recording_worker(3)
    x, host = numbers(), torch.empty(4)
    total = worker.malloc((4,), F32)
    worker.copy_to(total, torch.zeros(4))

    def graph() -> None:
        made = worker.submit_next_level(DOUBLE, TaskArgs(x=worker.defer(x), y=Allocate((4,), F32)))["y"]
        worker.submit_next_level(ADD_INTO, TaskArgs(x=made, y=total, amount=0.5))
        worker.submit_next_level(GROW, TaskArgs(x=total, amount=1.0))
        worker.copy_from(total, host)

    with worker.record([x]) as recording:
        graph()
    plan = recording.plan
    assert host.tolist() == [3.5, 5.5, 7.5, 9.5]
    for value in (1.0, 20.0):
        x.fill_(value)
        with worker.orchestrate():
            graph()
        wanted = host.clone()
        host.zero_()
        record.operations.clear()
        plan.run()
        assert torch.equal(host, wanted)
        assert record.names() == ["run", "copy_from"]
    worker.free(total)
    with pytest.raises(PlanError, match="memory that it uses was freed"):
        plan.run()
    buffers = worker.contexts[0].buffers
    plan.drop()
    assert worker.contexts[0].buffers == buffers - 1, "what the plan owned is given back"
    worker.close()


def test_a_plan_is_stale_with_new_weights_or_a_new_generation() -> None:
    worker, _ = recording_worker(3)
    x, weight = numbers(), numbers()
    out = worker.malloc((4,), F32)
    with worker.record([x]) as recording:
        worker.submit_next_level(DOUBLE_INTO, TaskArgs(x=worker.defer(weight, name="head"), y=out))
        worker.submit_next_level(ADD_INTO, TaskArgs(x=worker.defer(x), y=out, amount=0.0))
    recording.plan.run()
    weight.add_(1)
    with pytest.raises(PlanError, match="head has new contents"):
        recording.plan.run()
    endpoint_of(worker).die(restart=True)
    with pytest.raises(PlanError, match="was restarted"):
        recording.plan.run()
    worker.close()


def test_what_a_plan_cannot_do_is_refused_when_it_is_recorded() -> None:
    worker, _ = recording_worker(3, 2)
    x, out, far = numbers(), worker.malloc((4,), F32), worker.malloc((4,), F32, 1)
    with pytest.raises(PlanError, match="one worker"), worker.record([x]):
        worker.submit_next_level(DOUBLE_INTO, TaskArgs(x=worker.defer(x), y=out))
        worker.submit_next_level(DOUBLE_INTO, TaskArgs(x=worker.defer(x), y=far), 1)
    with pytest.raises(PlanError, match="only declared inputs"), worker.record([x]):
        worker.copy_to(out, numbers())
    with pytest.raises(PlanError, match="at least one task"), worker.record([x]):
        pass
    unused = numbers()
    with pytest.raises(PlanError, match="1 declared inputs were given to no"), worker.record([x, unused]):
        worker.submit_next_level(DOUBLE_INTO, TaskArgs(x=worker.defer(x), y=out))
    with pytest.raises(PlanError, match="after its last task"), worker.record([x]):
        worker.submit_next_level(DOUBLE_INTO, TaskArgs(x=worker.defer(x), y=out))
        worker.copy_from(out, torch.empty(4))
        worker.submit_next_level(GROW, TaskArgs(x=out, amount=1.0))
    before = worker.contexts[0].buffers
    with pytest.raises(PlanError, match="after the body"), worker.record([x]) as recording:
        worker.submit_next_level(DOUBLE, TaskArgs(x=worker.defer(x), y=Allocate((4,), F32)))
        _ = recording.plan
    assert worker.contexts[0].buffers == before, "a failed recording keeps nothing"
    worker.close()
