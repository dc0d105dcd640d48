"""One runtime at a time: its worker lives across programs, and the next one comes after its close."""

from __future__ import annotations

import pytest
import torch
from worker_rig import ADD_INTO, DOUBLE_INTO, FUNCTIONS, endpoint_of, numbers

from piecework.errors import DeviceError
from piecework.workers.tasks.arguments import TaskArgs
from piecework.workers.tasks.inline import inline
from piecework.workers.tasks.recording import Record, recorded
from piecework.workers.tasks.runtime import Runtime
from piecework.workers.tasks.worker import Worker


def test_a_second_runtime_closes_the_first() -> None:
    record, runtime = Record(), Runtime()

    def worker(name: str) -> Worker:
        make = lambda: Worker(3, [recorded(inline(name=name), record)], functions=FUNCTIONS)  # noqa: E731
        return runtime.worker(name, make)

    weight, hidden, found = numbers(), torch.zeros(4), torch.empty(4)
    first = worker("one")
    norm = TaskArgs(x=first.defer(weight), y=first.defer(hidden, upload=False))
    first.run_next_level(DOUBLE_INTO, norm)
    assert worker("one") is first
    again = first.defer(hidden, upload=False, require_existing=True)
    out = first.malloc((4,), torch.float32)
    first.run_next_level(ADD_INTO, TaskArgs(x=again, y=out, amount=1.0))
    first.copy_from(out, found)
    assert found.tolist() == [3, 5, 7, 9], "an output stays for the next program of the runtime"
    second = worker("two")
    second.run_next_level(DOUBLE_INTO, TaskArgs(x=second.defer(weight), y=second.defer(hidden)))
    runtime.close()
    runtime.close()
    assert [(who, what) for who, what, _ in record.operations] == [
        *[("one", what) for what in ("malloc", "copy_to", "malloc", "run")],
        *[("one", what) for what in ("malloc", "run", "copy_from", "close")],
        *[("two", what) for what in ("malloc", "copy_to", "malloc", "run", "close")],
    ]


def test_after_a_fault_the_worker_is_made_anew() -> None:
    record, runtime = Record(), Runtime()

    def worker() -> Worker:
        make = lambda: Worker(3, [recorded(inline(name="w"), record)], functions=FUNCTIONS)  # noqa: E731
        return runtime.worker("same", make)

    first = worker()
    out = first.malloc((4,), torch.float32)
    endpoint_of(first).die()
    with pytest.raises(DeviceError, match="w died"):
        first.copy_to(out, numbers())
    second = worker()
    assert second is not first
    second.malloc((4,), torch.float32)
    assert record.names() == ["malloc", "copy_to", "close", "malloc"], "and nothing was freed on the dead one"
    runtime.close()
