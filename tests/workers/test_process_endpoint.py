"""Tensors in a child: what is copied there, computed there and copied back is what went in."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
import torch
from endpoint_functions import CALLS
from hypothesis import given, settings
from hypothesis import strategies as st

from piecework.errors import ConfigError, DeviceError, WorkerError
from piecework.workers.endpoint import Region
from piecework.workers.process.endpoint import ProcessEndpoint, process
from piecework.workers.process.segments import MemfdSegment, SegmentPool, open_segment, part

LIMIT = 120
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool)


@pytest.fixture(scope="module")
def endpoint():
    made = ProcessEndpoint("cpu", CALLS)
    yield made
    made.close(5)
    assert made.lost is not None and made.lost.exit_code == 0


def region(endpoint, tensor, offset=0):
    buffer = endpoint.malloc(offset + max(1, tensor.nbytes))
    return Region(buffer, offset, tuple(tensor.shape), tensor.dtype)


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(0, 40), min_size=0, max_size=3),
    dtype=st.sampled_from(DTYPES),
    offset=st.sampled_from([0, 8, 4096]),
)
def test_any_tensor_goes_there_and_back(endpoint, shape, dtype, offset):
    tensor = torch.randint(0, 2, shape).to(dtype)
    there, back = region(endpoint, tensor, offset), torch.zeros_like(tensor)
    endpoint.copy_to(there, tensor)
    endpoint.copy_from(there, back).result(LIMIT)
    assert torch.equal(tensor, back)
    endpoint.free(there.buffer)


def test_a_call_runs_after_the_copies_before_it_and_before_those_behind(endpoint):
    x, y, out = torch.randn(300, 1000), torch.randn(300, 1000), torch.zeros(300, 1000)
    places = [region(endpoint, one) for one in (x, y, out)]
    for factor in (2, 3):
        endpoint.copy_to(places[0], x)
        endpoint.copy_to(places[1], y)
        endpoint.run("add", [*places, factor])
        endpoint.copy_from(places[2], out).result(LIMIT)
        assert torch.equal(out, torch.add(x, y, alpha=factor))


def test_views_of_a_buffer_keep_their_offset(endpoint):
    x = torch.arange(12.0).reshape(4, 3)
    whole = region(endpoint, x)
    endpoint.copy_to(whole, x)
    back = torch.zeros(2, 3)
    endpoint.copy_from(Region(whole.buffer, 24, (2, 3), torch.float32), back).result(LIMIT)
    assert torch.equal(back, x[2:])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda e, r: e.copy_from(Region(r.buffer, 4, (4,), torch.float32), torch.zeros(4)).result(LIMIT),
        lambda e, r: e.copy_from(Region(r.buffer, -4, (4,), torch.float32), torch.zeros(4)).result(LIMIT),
        lambda e, r: e.copy_from(Region(10**6, 0, (4,), torch.float32), torch.zeros(4)).result(LIMIT),
        lambda e, r: e.free(10**6),
        lambda e, r: e.run("no such digest", []).result(LIMIT),
        lambda e, r: e.run("fail", ["planned"]).result(LIMIT),
        lambda e, r: e.malloc(0),
        lambda e, r: e.copy_to(r, torch.zeros(5)),
        lambda e, r: e.copy_to(r, torch.zeros(4, dtype=torch.int32)),
        lambda e, r: e.copy_to(r, torch.zeros(8)[::2]),
    ],
)
def test_what_is_wrong_is_refused_and_the_worker_goes_on(endpoint, wrong):
    place = region(endpoint, torch.zeros(4))
    with pytest.raises((WorkerError, ConfigError)):
        wrong(endpoint, place)
    endpoint.copy_to(place, torch.ones(4))
    back = torch.zeros(4)
    endpoint.copy_from(place, back).result(LIMIT)
    assert torch.equal(back, torch.ones(4))


def test_a_function_that_a_child_cannot_import_is_refused_before_it_is_started():
    with pytest.raises(ConfigError, match="import"):
        ProcessEndpoint("cpu", {"local": lambda x: x})


@pytest.mark.slow
def test_a_dead_child_fails_what_it_was_asked_for_and_a_restart_is_a_new_generation():
    endpoint = process("cpu", "mortal")(CALLS)
    place = region(endpoint, torch.zeros(4))
    running, behind = endpoint.run("wait", [1000.0]), endpoint.copy_from(place, torch.zeros(4))
    os.kill(endpoint.pid, signal.SIGKILL)
    for future in (running, behind):
        with pytest.raises(DeviceError, match="SIGKILL"):
            future.result(LIMIT)
    with pytest.raises(DeviceError):
        endpoint.malloc(4)
    endpoint.restart()
    assert endpoint.generation == 1
    with pytest.raises(WorkerError, match="not there"):
        endpoint.copy_from(place, torch.zeros(4)).result(LIMIT)
    endpoint.close(5)
    endpoint.close(5)
    with pytest.raises(DeviceError, match="closed"):
        endpoint.restart()


@pytest.mark.slow
def test_named_memory_does_the_same_and_leaves_nothing():
    def mapped():
        """What this process has of /dev/shm; others may have theirs."""
        return set(re.findall("/dev/shm/.*", Path("/proc/self/maps").read_text()))

    before = mapped()
    endpoint = ProcessEndpoint("cpu", CALLS, memfd=False)
    tensor = torch.randn(100_000)
    place, back = region(endpoint, tensor), torch.zeros(100_000)
    endpoint.copy_to(place, tensor)
    endpoint.copy_from(place, back).result(LIMIT)
    made = mapped() - before
    assert torch.equal(tensor, back) and made and all(Path(name).exists() for name in made)
    endpoint.close(5)
    assert not any(Path(name).exists() for name in made)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_twenty_starts_and_closes_with_torch_leak_nothing():
    def fds():
        return len(list(Path("/proc/self/fd").iterdir()))

    before = fds()
    for number in range(20):
        endpoint = ProcessEndpoint("cpu", CALLS)
        tensor = torch.randn(50_000)
        endpoint.copy_to(region(endpoint, tensor), tensor)
        if number % 3 == 0:
            os.kill(endpoint.pid, signal.SIGKILL)
        endpoint.close(20)
        assert not Path(f"/proc/{endpoint.pid}").exists()
    assert fds() <= before


def test_a_segment_is_the_same_memory_on_both_sides():
    ours = MemfdSegment(2**16)
    theirs = open_segment(ours.size, ours.name, tuple(os.dup(fd) for fd in ours.fds))
    with part(ours, 5) as view:
        view[:] = b"hello"
    with part(theirs, 5) as view:
        assert bytes(view) == b"hello"
    tensor = torch.frombuffer(theirs.memory, dtype=torch.uint8)
    assert tensor[0] == ord("h")
    looking = memoryview(theirs.memory)
    with pytest.raises(BufferError):
        theirs.close()
    looking.release()
    del tensor
    theirs.close()
    ours.close()


def test_a_pool_uses_segments_again_and_keeps_no_more_than_it_should():
    pool = SegmentPool(kept=2**17)
    first, segment, new = pool.take(1)
    assert new and segment.size == 2**16
    assert pool.give_back(first) == []
    again, same, new = pool.take(2**16)
    assert (again, same, new) == (first, segment, False)
    large, _, new = pool.take(2**20)
    assert new and pool.give_back(large) == [large]
    assert pool.give_back(again) == []
    pool.close()
