"""The in-place move: all bytes of the buffer are what an element-wise copy between two buffers leaves."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from relayout_cases import DTYPES, bits, expected, expected_by_views, extent, filled, strides_of

from piecework.devices import make_device
from piecework.kvcache.block_moves import blocks_of
from piecework.kvcache.layout import Rows, direction, fold_row, rows_of
from piecework.kvcache.relayout import (
    METHODS,
    Change,
    RelayoutError,
    copy_tensor_in_place,
    move_in_place,
    relayout,
)
from piecework.profile import Profile

SHAPES = [(1, 2, 3, 4), (1, 8, 16, 32), (1, 16, 33, 64), (1, 4, 128, 16)]
LLM_SHAPES = [(1, 2, 1025, 64), (1, 8, 257, 128), (1, 3, 64, 513)]


def run(shape, src, dst, dtype, kv_dim, live, method, oracle=expected_by_views):
    """Move in a buffer with room around both layouts; returns the elements that moved."""
    size = max(extent(shape, src), extent(shape, dst)) + 7
    buffer = filled(size, dtype)
    wanted, moving = oracle(buffer, shape, src, dst, kv_dim, live)
    profile = Profile(enabled=True)
    moved = move_in_place(
        buffer, shape, src, dst, dtype, kv_dim=kv_dim, live=live, method=method, profile=profile
    )
    assert torch.equal(bits(buffer), bits(wanted))
    assert profile.snapshot()["bytes"]["relayout.moved"]["total"] == moved
    return moved, moving * dtype.itemsize, profile.snapshot()


CASES = [(shape, kv_dim, DTYPES) for shape in SHAPES for kv_dim in range(4)]
CASES += [(shape, kv_dim, DTYPES[::2]) for shape in LLM_SHAPES for kv_dim in (2, 3)]


def apart(number, shape, kv_dim, dtypes):
    """A case with one of its types, each in its turn, and slow with the others."""
    own = number % len(dtypes)
    rest = (*dtypes[:own], *dtypes[own + 1 :])
    return (shape, kv_dim, dtypes[own : own + 1]), pytest.param(shape, kv_dim, rest, marks=pytest.mark.slow)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("shape", "kv_dim", "dtypes"), [c for i, case in enumerate(CASES) for c in apart(i, *case)], ids=str
)
def test_caches_of_every_form_grow_and_shrink(shape, kv_dim, dtypes, method):
    """Keys are kv_dim 2, transposed values kv_dim 3. Nothing stands before some token dimensions, and then
    nothing would move: two caches that follow each other do.
    """
    if math.prod(shape[:kv_dim]) == 1:
        shape, kv_dim = (2, *shape), kv_dim + 1
    tokens = shape[kv_dim]
    for dtype in dtypes:
        for small, large in ((tokens, tokens + 1 + tokens // 10), (tokens, 2 * tokens)):
            low, high = (strides_of(shape, kv_dim, capacity) for capacity in (small, large))
            for live in {tokens, max(1, tokens // 3)}:
                for src, dst in ((low, high), (high, low)):
                    moved, moving, profile = run(shape, src, dst, dtype, kv_dim, live, method)
                    assert moved == moving > 0, "this case moves nothing"
                    assert "relayout.temporary" not in profile["bytes"]
                assert run(shape, low, low, dtype, kv_dim, live, method)[:2] == (0, 0)


@pytest.mark.parametrize("method", METHODS)
def test_one_element_at_a_time_says_the_same(method):
    shape = (2, 3, 4, 5)
    for kv_dim in (1, 2, 3):
        low, high = (strides_of(shape, kv_dim, shape[kv_dim] + n) for n in (0, 2))
        for src, dst in ((low, high), (high, low)):
            moved, moving, _ = run(
                shape, src, dst, torch.float32, kv_dim, shape[kv_dim] - 1, method, expected
            )
            assert moved == moving > 0


@pytest.mark.parametrize("method", METHODS)
def test_the_direction_follows_the_strides(method):
    """Walking from the last row always, as for growing, overwrites rows that have not moved: 3072 tokens of
    prefill, back to a decode variant with room for 2175.
    """
    shape = (1, 4, 2175, 2)
    src, dst = strides_of(shape, 2, 3072), strides_of(shape, 2, 2175)
    assert direction(rows_of(shape, src, dst)) == "first to last"
    assert direction(rows_of(shape, dst, src)) == "last to first"
    for one, other in ((src, dst), (dst, src)):
        assert run(shape, one, other, torch.float16, 2, 2175, method)[0] == 3 * 2175 * 2 * 2


@st.composite
def layouts(draw):
    """A shape with two layouts of nested rows, each with gaps of its own in any of its dimensions."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    both = []
    for _ in range(2):
        strides, span = [], 1
        for n in reversed(shape):
            strides.insert(0, span)
            span = span * n + draw(st.sampled_from([0, 0, 1, 2, 7]))
        both.append(tuple(strides))
    order = draw(st.permutations(range(len(shape) - 1)))
    places = [*order, len(shape) - 1]  # the last one stays packed
    if draw(st.booleans()):
        shape, both[0] = [shape[p] for p in places], tuple(both[0][p] for p in places)
        both[1] = tuple(both[1][p] for p in places)
    return tuple(shape), *both, draw(st.integers(0, len(shape) - 1)), draw(st.sampled_from(sorted(METHODS)))


@settings(max_examples=150, deadline=None)
@given(layouts(), st.sampled_from(DTYPES), st.data())
def test_any_two_layouts(case, dtype, data):
    shape, src, dst, kv_dim, method = case
    run(shape, src, dst, dtype, kv_dim, data.draw(st.integers(0, shape[kv_dim])), method)


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 40), st.integers(1, 50), st.integers(0, 60), st.integers(0, 60), st.integers(1, 9))
def test_blocks_never_overlap_and_are_few(count, row, first, second, bounce):
    """A copy that isn't through a temporary has its source and its target apart."""
    rows = Rows(row, (count,), (row + first,), (row + second,))
    blocks = list(blocks_of(rows, bounce))
    assert sum(b.length * b.size for b in blocks) == rows.moving * row
    for b in blocks:
        src = (b.src, b.src + (b.length - 1) * b.src_stride + b.size)
        dst = (b.dst, b.dst + (b.length - 1) * b.dst_stride + b.size)
        assert b.bounce or src[1] <= dst[0] or dst[1] <= src[0]
    doubled = list(blocks_of(Rows(row, (1024,), (row,), (2 * row,)), bounce))
    assert len(doubled) == 10


def test_the_longest_dense_run_is_one_row():
    assert fold_row((1, 8, 16, 32), (4096, 512, 32, 1), (8192, 1024, 32, 1)) == (2, 512)
    assert fold_row((2, 8, 16, 32), (4096, 512, 32, 1), (4096, 512, 32, 1)) == (0, 8192)
    assert fold_row((2, 8, 16, 1), (4096, 512, 32, 9), (4096, 512, 40, 7)) == (3, 1)
    values = rows_of((1, 8, 64, 100), (51200, 6400, 100, 1), (102400, 12800, 200, 1))
    assert values == Rows(100, (512,), (100,), (200,)) and values.moving == 511


def test_strides_of_both_kinds_and_other_orders_go_through_a_temporary():
    shape = (2, 3, 4)
    for src, dst in (((12, 4, 1), (15, 4, 1)), ((20, 4, 1), (18, 5, 1)), ((12, 4, 1), (4, 8, 1))):
        moved, moving, profile = run(shape, src, dst, torch.int8, 1, 3, "rows")
        mixed = src != (12, 4, 1) or dst == (4, 8, 1)
        assert (direction(rows_of(shape, src, dst)) == "temporary") == mixed
        assert moved >= moving > 0 and ("relayout.temporary" in profile["bytes"]) == mixed


def test_a_token_dimension_that_moves_goes_through_a_temporary():
    buffer = filled(2 * 3 * 5 * 9, torch.float32)
    src = buffer.as_strided((1, 2, 5, 3), (54, 27, 3, 1))  # room for 9 tokens of 3
    dst = buffer.as_strided((1, 2, 3, 5), (54, 27, 9, 1))
    wanted = buffer.clone()
    wanted.as_strided((1, 2, 3, 4), dst.stride()).copy_(src[:, :, :4].clone().transpose(2, 3))
    profile = Profile(enabled=True)
    assert copy_tensor_in_place(src, dst, 2, 3, live=4, profile=profile) == 2 * 3 * 4 * 4
    assert torch.equal(bits(buffer), bits(wanted))
    assert profile.snapshot()["bytes"]["relayout.temporary"]["total"] == 2 * 3 * 4 * 4


@pytest.mark.parametrize("method", METHODS)
def test_layers_move_together_and_are_profiled(method):
    shape, profile = (1, 2, 9, 8), Profile(enabled=True)
    buffers = [filled(2 * 12 * 8, torch.bfloat16) for _ in range(6)]
    wanted, changes = [], []
    for i, buffer in enumerate(buffers):
        kv_dim = 2 + i % 2
        own = shape if kv_dim == 2 else (1, 2, 8, 9)
        low, high = strides_of(own, kv_dim, 9), strides_of(own, kv_dim, 12)
        changes.append(Change(buffer.as_strided(own, low), buffer.as_strided(own, high), kv_dim, kv_dim, 7))
        wanted.append(expected_by_views(buffer, own, low, high, kv_dim, 7)[0])
    moved = relayout(changes, method, profile)
    assert all(torch.equal(bits(b), bits(w)) for b, w in zip(buffers, wanted, strict=True))
    snapshot = profile.snapshot()
    assert snapshot["bytes"]["relayout.moved"]["total"] == moved == 3 * (1 * 7 * 8 + 15 * 7) * 2
    assert snapshot["timers"]["relayout"]["count"] == 1


@pytest.mark.parametrize("name", ["cpu", "sim"])
def test_each_device_has_a_method(name):
    device = make_device(name)
    buffer = device.zeros((2 * 12 * 8,), torch.float32)
    buffer.copy_(torch.arange(buffer.numel()))
    wanted, _ = expected_by_views(buffer.clone(), (2, 9, 8), (72, 8, 1), (96, 8, 1), 1, 9)
    moved = move_in_place(
        buffer, (2, 9, 8), (72, 8, 1), (96, 8, 1), torch.float32, kv_dim=1, method=device.relayout
    )
    assert moved == 72 * 4 and torch.equal(buffer, wanted)


def test_rows_of_small_distance_bounce():
    shape = (1, 2, 3, 1000)
    src, dst = (6000, 3000, 1000, 1), (6002, 3001, 1000, 1)
    for one, other in ((src, dst), (dst, src)):
        assert any(b.bounce for b in blocks_of(rows_of(shape, one, other), 100))
        assert run(shape, one, other, torch.float32, 1, 2, "blocks")[0] == 12000


def test_nothing_to_move_is_no_error():
    for shape in ((0, 4), (3, 0), ()):
        strides = tuple(torch.empty(shape).stride())
        assert move_in_place(torch.empty(4), shape, strides, strides, torch.float32) == 0
    buffer = filled(24, torch.float32)
    view = buffer.as_strided((2, 3, 4), (12, 4, 1))
    assert copy_tensor_in_place(view, view, 1, 1, live=0) == 0


def refused(message, *args, **more):
    with pytest.raises(RelayoutError, match=message) as caught:
        move_in_place(*args, **more) if len(args) > 4 else copy_tensor_in_place(*args, **more)
    return caught.value


def test_what_does_not_fit_is_refused_with_the_property_and_both_values():
    buffer = filled(96, torch.float32)
    view = buffer.as_strided((2, 3, 4), (12, 4, 1))
    error = refused(
        "dtype is torch.float32 in the source and torch.int32", view, view.view(torch.int32), 1, 1
    )
    assert (error.property, error.src, error.dst) == ("dtype", torch.float32, torch.int32)
    refused(r"shape is \(2, 3, 4\) in the source and \(2, 2, 4\)", view, view[:, :2], 1, 1)
    refused(r"exchanged", view, view, 1, 2)
    refused("data_ptr is 0x", view, buffer[1:].as_strided((2, 3, 4), (12, 4, 1)), 1, 1)
    refused(r"stride\(-1\) is 1 in the source and 2", view, buffer.as_strided((2, 3, 4), (48, 8, 2)), 1, 1)
    refused("kv_dim is 3 in the source and 3 in the target: they must be from 0 to 2", view, view, 3, 3)
    refused("rank is 3 in the source and 2", view, view[0], 1, 1)
    refused("live=4 must be from 0 to 3", view, view, 1, 1, live=4)
    refused("must not share memory", view, buffer.as_strided((2, 3, 4), (8, 4, 1)), 1, 1)
    strides = (12, 4, 1)
    refused(
        "extent in elements is 24 in the source and 104",
        buffer,
        (2, 3, 4),
        strides,
        (92, 4, 1),
        torch.float32,
    )
    refused("number of strides is 3 in the source and 2", buffer, (2, 3, 4), strides, (4, 1), torch.float32)
    for dtype in (torch.int4, torch.uint2, torch.quint4x2, torch.float4_e2m1fn_x2):
        refused(f"dtype is {dtype}", buffer, (2, 3, 4), strides, strides, dtype)
    packed = torch.zeros(24, dtype=torch.uint8).view(torch.int4)
    refused("less than a byte", packed, packed, 0, 0)


@pytest.mark.parametrize("method", ["rows", "ctypes"])
def test_addresses_of_other_devices_are_not_touched(method):
    view = torch.empty((2, 3), device="meta")
    wide = torch.empty(12, device="meta").as_strided((2, 3), (6, 1))
    refused(f"the method {method} is for cpu", view, wide, 1, 1, method=method)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_threads_share_a_tensor(threads):
    """Of tensors of some 100 KB each thread moves slices, where each gets 96 KB and more."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for shape, kv_dim in (((1, 2, 4000, 130), 2), ((1, 4, 64, 2001), 3), ((2, 300000), 1)):
            tokens = shape[kv_dim]
            for capacity in (tokens + 1, tokens + tokens // 10, tokens + tokens // 2, 3 * tokens):
                low, high = (strides_of(shape, kv_dim, size) for size in (tokens, capacity))
                for src, dst in ((low, high), (high, low)):
                    moved, moving, _ = run(shape, src, dst, torch.int16, kv_dim, tokens, "rows")
                    assert moved == moving > 0
    finally:
        torch.set_num_threads(before)
