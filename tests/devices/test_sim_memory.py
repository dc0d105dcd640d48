"""The memory of sim: blocks don't overlap, free bytes are NaN, everything comes back."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from piecework.devices.sim.memory import SimMemory
from piecework.devices.sim.ranges import FreeRanges
from piecework.errors import DeviceError


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 60)), max_size=80))
def test_ranges_are_a_set_of_bytes(actions):
    ranges = FreeRanges()
    ranges.add(0, 256)
    free, taken = set(range(256)), []
    for take, n in actions:
        if take:
            start = ranges.take(n)
            holes = ("".join("x" if i in free else " " for i in range(256))).split(" ")
            assert (start is None) == (max(map(len, holes)) < n)
            if start is not None:
                assert free.issuperset(range(start, start + n))
                free -= set(range(start, start + n))
                taken.append((start, start + n))
        elif taken:
            back = taken.pop(n % len(taken))
            ranges.add(*back)
            free |= set(range(*back))
        found = ranges.snapshot()
        assert {i for a, b in found for i in range(a, b)} == free
        assert all(a[1] < b[0] for a, b in itertools.pairwise(found)), "neighbours are merged"
    assert ranges.total == len(free)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3000)), max_size=25))
def test_blocks_keep_their_contents_until_they_are_freed(actions):
    memory = SimMemory(1 << 20)
    whole = memory.free_bytes
    live = []
    block = None
    for number, (allocate, n) in enumerate(actions):
        if allocate:
            block = memory.empty((n,), None, torch.int32)
            assert bool((block == -1).all()), "a new block is poisoned, whoever had the bytes before"
            live.append((number, block.fill_(number)))
        elif live:
            live.pop(n % len(live))
        assert all(int(block[0]) == int(block[-1]) == mark for mark, block in live)
    live.clear()
    del block
    assert memory.free_bytes == whole


def test_a_freed_block_is_nan_at_once_for_who_still_looks():
    memory = SimMemory(1 << 16)
    tensor = memory.empty((4, 8), (1, 4), torch.bfloat16).fill_(1.5)
    view = tensor[1:, 2:5]
    weak, weak_view = memory.alias(tensor), memory.alias(view)
    assert weak.stride() == (1, 4) and weak.data_ptr() == tensor.data_ptr()
    assert weak_view.data_ptr() == view.data_ptr() and torch.equal(weak_view, view)
    del tensor
    assert bool((weak == 1.5).all()), "a view keeps the block"
    del view
    assert bool(weak.isnan().all()) and bool(weak_view.isnan().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_poison_is_nan_in_every_float_type(dtype):
    assert bool(SimMemory(1 << 16).empty((3, 5), None, dtype).isnan().all())


def test_tensors_without_elements_have_no_block():
    memory = SimMemory(1 << 16)
    whole = memory.free_bytes
    empty = memory.empty((0, 7), None, torch.float32)
    assert empty.shape == (0, 7) and memory.holds(empty) and memory.free_bytes == whole
    assert memory.alias(empty).shape == (0, 7)
    assert not memory.holds(torch.ones(1))


def test_a_full_memory_says_what_was_wanted():
    memory = SimMemory(1 << 16)
    kept = memory.allocate(1 << 15)
    with pytest.raises(DeviceError, match=r"memory: 40000 bytes wanted, \d+ of 65536 are free"):
        memory.allocate(40000)
    del kept


def test_a_pool_lends_memory_and_gives_it_back_when_the_last_user_left():
    memory = SimMemory(1 << 20)
    whole = memory.free_bytes
    pool = memory.new_pool()
    first = memory.allocate(1000, pool)
    taken = whole - memory.free_bytes
    assert taken == pool.reserved >= 1024
    address = first.data_ptr()
    del first
    assert memory.free_bytes == whole - taken, "the pool keeps what it has"
    again = memory.allocate(1000, pool)
    assert again.data_ptr() == address
    del pool
    assert memory.free_bytes == whole - taken
    del again
    assert memory.free_bytes == whole
