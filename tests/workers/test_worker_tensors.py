"""Handles are checked; deferred tensors are known by identity and version, and keep their offsets."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from worker_rig import ADD_INTO, DOUBLE, DOUBLE_INTO, FAIL_INTO, GROW, endpoint_of, numbers, recording_worker

from piecework.workers.tasks.arguments import Allocate, TaskArgs
from piecework.workers.tasks.handles import HandleError

F32 = torch.float32
FOUR = Allocate((4,), F32)


def test_each_field_of_a_handle_is_checked_by_name() -> None:
    worker, record = recording_worker(3, 2)
    other = worker.malloc((4,), F32, 1)
    cell = worker.malloc((4,), F32)
    host = torch.zeros(4)
    for handle, tensor, field in (
        (replace(cell, worker="w9"), host, "worker"),
        (replace(cell, generation=3), host, "generation"),
        (replace(cell, id=77), host, "id"),
        (cell.view(4, (4,)), host, "shape"),
        (cell.view(-4, (1,)), torch.zeros(1), "offset"),
        (cell.view(2, (1,)), torch.zeros(1), "offset"),
        (replace(cell, shape=(5,)), torch.zeros(5), "shape"),
        (cell, torch.zeros(3), "shape"),
        (cell, torch.zeros(4, dtype=torch.int32), "dtype"),
        (cell, torch.zeros(8)[::2], "strides"),
    ):
        with pytest.raises(HandleError) as caught:
            worker.copy_to(handle, tensor)
        assert caught.value.field == field
        with pytest.raises(HandleError):
            worker.copy_from(handle, tensor)
    with worker.orchestrate(), pytest.raises(HandleError, match="worker='w1' is not allowed: w0"):
        worker.submit_next_level(DOUBLE, TaskArgs(x=other, y=FOUR), 0)
    worker.free(cell)
    for use in (lambda: worker.free(cell), lambda: worker.copy_to(cell, host)):
        with pytest.raises(HandleError, match=f"id={cell.id}.*it was freed"):
            use()
    for shape in ((0,), (4, -1)):
        with pytest.raises(HandleError, match="positive sizes"):
            worker.malloc(shape, F32)
    assert record.names() == ["malloc", "malloc", "free"], "nothing that was refused was sent"
    worker.close()


def test_a_view_of_a_handle_is_those_bytes() -> None:
    worker, _ = recording_worker(3)
    cell = worker.malloc((2, 3), F32)
    worker.copy_to(cell, torch.arange(6.0).view(2, 3))
    worker.copy_to(cell.view(12, (3,)), torch.full((3,), 9.0))
    found = torch.empty(2)
    worker.copy_from(cell.view(8, (2,)), found)
    assert found.tolist() == [2, 9]
    worker.close()


def test_weights_are_uploaded_once_and_again_when_they_change() -> None:
    worker, record = recording_worker(3)
    weight, out = numbers(), worker.malloc((4,), F32)

    def step() -> list[float]:
        found = torch.empty(4)
        with worker.orchestrate():
            worker.submit_next_level(DOUBLE_INTO, TaskArgs(x=worker.defer(weight), y=out))
            worker.copy_from(out, found)
        return found.tolist()

    assert step() == step() == [2, 4, 6, 8]
    assert record.names() == ["malloc", "malloc", "copy_to", "run", "copy_from", "run", "copy_from"]
    weight.add_(1)
    assert step() == [4, 6, 8, 10]
    weight.numpy()[:] = 0  # torch doesn't see it
    assert step() == [4, 6, 8, 10]
    worker.changed(weight)
    assert step() == [0, 0, 0, 0]
    assert record.names().count("malloc") == 2, "new contents go where the old ones were"
    worker.close()


def test_an_address_that_is_used_again_is_another_tensor() -> None:
    """The allocator gives a freed block to the next tensor of its size; what was there must not be served."""
    worker, _ = recording_worker(3)
    out = worker.malloc((1024,), F32)
    seen, again = set(), 0
    for value in range(12):
        weight = torch.full((1024,), float(value))
        again += weight.data_ptr() in seen
        seen.add(weight.data_ptr())
        worker.run_next_level(ADD_INTO, TaskArgs(x=worker.defer(weight), y=out, amount=0.0))
        found = torch.empty(1024)
        worker.copy_from(out, found)
        assert found[0].item() == found[-1].item() == value
        del weight
    assert again > 0, "no address was used twice, so nothing was tested"
    assert worker.contexts[0].buffers <= 3, "memory of tensors that are gone is given back"
    worker.close()


def test_a_view_keeps_its_offset_and_shares_its_base() -> None:
    worker, record = recording_worker(3)
    base = torch.arange(12.0).view(3, 4)
    found = torch.empty(4)
    with worker.orchestrate():
        for row in (2, 0):
            out = worker.submit_next_level(DOUBLE, TaskArgs(x=worker.defer(base[row]), y=FOUR))["y"]
            worker.copy_from(out, found)
            with worker.scope():
                pass
            if row == 2:
                second = worker.submit_next_level(
                    DOUBLE, TaskArgs(x=worker.defer(base[row, 2:4]), y=Allocate((2,), F32))
                )
                half = torch.empty(2)
                worker.copy_from(second["y"], half)
    assert found.tolist() == [0, 2, 4, 6]
    assert half.tolist() == [20, 22]
    assert record.names().count("copy_to") == 1, "the storage went up once"
    worker.close()


def test_an_output_that_is_a_deferred_tensor_keeps_its_dependency_and_stays_for_the_next_program() -> None:
    worker, record = recording_worker(3)
    x, hidden, host = numbers(), torch.zeros(4), torch.zeros(4)
    with worker.orchestrate():  # final norm
        out = worker.defer(hidden, upload=False, name="hidden")
        worker.submit_next_level(DOUBLE_INTO, TaskArgs(x=worker.defer(x), y=out))
        worker.submit_next_level(GROW, TaskArgs(x=worker.defer(hidden), amount=1.0))
        worker.copy_from(out, host)
    assert host.tolist() == [3, 5, 7, 9]
    with worker.orchestrate():  # head: another program on the same runtime
        chained = worker.defer(hidden, upload=False, require_existing=True, name="hidden")
        logits = worker.submit_next_level(DOUBLE, TaskArgs(x=chained, y=FOUR))["y"]
        worker.copy_from(logits, host)
    assert host.tolist() == [6, 10, 14, 18]
    assert record.names().count("copy_to") == 1, "only x was uploaded"
    assert hidden.tolist() == [0] * 4
    worker.close()


def test_what_must_exist_and_does_not_is_refused_by_name() -> None:
    worker, record = recording_worker(3)
    tensor = numbers()
    with worker.orchestrate():
        for deferred, message in (
            (worker.defer(tensor, require_existing=True, name="kv.0"), "require_existing='kv.0'.*on w0"),
            (worker.defer(tensor, upload=False, name="kv.0"), "upload=False.*w0 has nothing of kv.0 to read"),
        ):
            with pytest.raises(HandleError, match=message):
                worker.submit_next_level(DOUBLE, TaskArgs(x=deferred, y=FOUR))
    assert record.names() == []
    for wrong, message in (
        (torch.zeros(4, 4).t(), "weight=.*contiguous"),
        (torch.zeros(4, device="meta"), "weight='meta'.*CPU"),
        (torch.zeros(0), "weight=.*elements inside its storage of 0 bytes"),
    ):
        with pytest.raises(HandleError, match=message):
            worker.defer(wrong, name="weight")
    shrunk = torch.zeros(8)
    shrunk.untyped_storage().resize_(16)
    with pytest.raises(HandleError, match="inside its storage of 16 bytes"):
        worker.defer(shrunk)
    worker.close()


def test_after_a_failed_task_its_output_is_not_taken_for_the_host_tensor() -> None:
    worker, _ = recording_worker(3)
    target = numbers()
    with pytest.raises(ValueError, match="planned"):
        worker.run_next_level(FAIL_INTO, TaskArgs(x=worker.defer(numbers()), y=worker.defer(target)))
    found = torch.empty(4)
    worker.copy_from(worker.defer(target), found)
    assert found.tolist() == [1, 2, 3, 4], "it was uploaded, since nobody knows what the task left"
    worker.close()


def test_a_new_generation_has_nothing_and_gets_it_again() -> None:
    worker, record = recording_worker(3)
    weight, found = numbers(), torch.empty(4)
    worker.copy_from(worker.defer(weight), found)
    endpoint_of(worker).die(restart=True)
    with pytest.raises(HandleError, match="require_existing"):
        worker.copy_from(worker.defer(weight, require_existing=True), found)
    found.zero_()
    worker.copy_from(worker.defer(weight), found)
    assert found.tolist() == [1, 2, 3, 4]
    assert record.names() == ["malloc", "copy_to", "copy_from"] * 2, "no free of what the dead one had"
    worker.close()
