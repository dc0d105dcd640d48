"""Sizes are chosen before anything is captured, and what does not fit is dropped and named."""

from __future__ import annotations

import pytest
from capture_rig import FULL, PIECEWISE, Rig, prompt
from hypothesis import given
from hypothesis import strategies as st

from piecework.capture.measure import cost_of, measure
from piecework.capture.options import CaptureOptions, choose_options
from piecework.capture.plan import Cost, Wish, plan_captures
from piecework.capture.runner import Captured
from piecework.capture.sizes import DECODE_SIZES, PREFILL_SIZES, check_sizes, default_sizes, padded_size
from piecework.compilation import CompilationConfig
from piecework.devices import make_device
from piecework.devices.sim import SimDevice
from piecework.errors import ConfigError

sizes_strategy = st.sets(st.integers(1, 200), min_size=1, max_size=20).map(lambda s: tuple(sorted(s)))


def test_default_sizes_are_those_of_the_design():
    assert DECODE_SIZES[:8] == (1, 2, 4, 8, 12, 16, 24, 32) and DECODE_SIZES[-1] == 256
    assert PREFILL_SIZES[:9] == (4, 8, 12, 16, 20, 24, 28, 32, 48)
    assert {240, 256, 288, 512, 576, 1024, 1280, 4096} <= set(PREFILL_SIZES)
    assert not {272, 528, 544, 1088} & set(PREFILL_SIZES)
    assert default_sizes("decode", 10) == (1, 2, 4, 8, 10)
    assert default_sizes("decode", 1000) == DECODE_SIZES
    assert default_sizes("prefill", 3) == (3,)


def test_a_batch_is_padded_to_the_next_size():
    assert [padded_size((1, 2, 4), n) for n in (1, 2, 3, 4, 5)] == [1, 2, 4, 4, None]
    assert padded_size((), 1) is None
    assert [padded_size((1, 2, 4), n, exact=True) for n in (1, 2, 3, 4, 5)] == [1, 2, None, 4, None]


def test_given_sizes_are_checked():
    assert check_sizes("decode_capture_sizes", [4, 1, 4], 8, "max_num_seqs") == (1, 4)
    for bad in (0, -1, 9):
        with pytest.raises(ConfigError, match=rf"sizes from 1 to max_num_seqs=8, and {bad} is not"):
            check_sizes("decode_capture_sizes", [1, bad], 8, "max_num_seqs")


def test_without_limits_everything_is_planned():
    plan = plan_captures([Wish("full", (1, 2, 4), 1), Wish("piecewise", (4, 8), 31)], graph_budget=None)
    assert plan.graphs == 3 + 62 and plan.bytes is None and plan.dropped == ()
    assert plan.lines() == ["captures 65 graphs: full [1, 2, 4], piecewise [4, 8]"]


def test_the_ascend_budget_drops_sizes_and_says_so():
    wishes = [Wish("full", DECODE_SIZES, 1), Wish("piecewise", PREFILL_SIZES, 61)]
    plan = plan_captures(wishes, graph_budget=1800)
    assert 1700 < plan.graphs <= 1800
    assert plan.sizes["full"] == DECODE_SIZES, "dropping one of these frees 1 graph and not 61"
    assert plan.sizes["piecewise"][-1] == 4096
    first, second = plan.lines()
    assert first.startswith(f"captures {plan.graphs} graphs: full [1, 2, 4, 8")
    assert second.startswith("does not capture piecewise [") and second.endswith("room for 1800 graphs")


@given(st.lists(st.tuples(sizes_strategy, st.integers(1, 20)), max_size=3), st.integers(0, 300))
def test_a_plan_keeps_its_budget_and_drops_nothing_without_need(wishes, budget):
    named = [Wish(f"p{i}", sizes, each) for i, (sizes, each) in enumerate(wishes)]
    plan = plan_captures(named, graph_budget=budget)
    graphs = sum(len(plan.sizes[w.name]) * w.graphs_per_size for w in named)
    assert plan.graphs == graphs <= budget
    for wish in named:
        gone = {d.size for d in plan.dropped if d.name == wish.name}
        assert gone | set(plan.sizes[wish.name]) == set(wish.sizes)
        assert not gone & set(plan.sizes[wish.name])
        if plan.sizes[wish.name]:
            assert plan.sizes[wish.name][-1] == wish.sizes[-1], "the largest size goes last"
    if plan.dropped:
        last = plan.dropped[-1].name
        assert graphs + next(w.graphs_per_size for w in named if w.name == last) > budget


@given(sizes_strategy, st.integers(0, 5000), st.integers(0, 100), st.integers(0, 5000))
def test_a_plan_keeps_its_memory(sizes, pool, graph, budget):
    cost = Cost(pool, graph)
    plan = plan_captures([Wish("full", sizes, 2)], graph_budget=None, memory_budget=budget, cost=cost)
    assert plan.bytes == cost.of(plan.graphs) <= budget
    if plan.dropped:
        assert cost.of(plan.graphs + 2) > budget
        assert plan.dropped[0].reason.startswith("graphs may take")


def test_cost_is_worked_out_from_two_sizes():
    made = [Captured("full", 8, 1, 5000), Captured("piecewise", 8, 3, 2000), Captured("full", 4, 1, 100)]
    assert cost_of([*made, Captured("piecewise", 4, 3, 1000)]) == Cost(5000 - 334 + 2000 - 3 * 334, 334)
    assert cost_of([Captured("full", 8, 1, 5000)]) == Cost(5000, 0)
    assert cost_of([]) == Cost(0, 0)


@pytest.mark.parametrize("options", [FULL, PIECEWISE], ids=["full", "piecewise"])
def test_the_measured_cost_covers_what_captures_take(options):
    options = CaptureOptions(options.decode, options.prefill, tuple(range(1, 9)), (4, 8, 16))
    rig = Rig(options=options)
    before = rig.device.free_memory()
    trial = rig.make_runner()
    cost = measure(trial)
    assert rig.device.graphs == 0
    del trial
    assert rig.device.free_memory() == before, "what was captured for the measurement is gone"
    plan = rig.runner.plan(memory_budget=1 << 24, cost=cost)
    rig.runner.capture(plan)
    taken = before - rig.device.free_memory()
    assert plan.dropped == () and taken <= plan.bytes <= 1.5 * taken


def test_memory_that_is_short_drops_sizes():
    rig = Rig(options=CaptureOptions("full", "piecewise", tuple(range(1, 9)), (4, 8)))
    cost = measure(rig.make_runner())
    budget = cost.of(9)
    plan = rig.runner.plan(memory_budget=budget, cost=cost)
    assert plan.dropped and plan.bytes <= budget
    before = rig.device.free_memory()
    rig.runner.capture(plan)
    assert before - rig.device.free_memory() <= budget
    rig.check(rig.item(0, prompt(3)))
    rig.check(rig.item(0, [5]))


def options(device, **config):
    return choose_options(
        CompilationConfig(**config), device, max_num_seqs=16, max_tokens=64, max_model_len=48
    )


def test_modes_come_from_the_device_or_are_refused():
    sim, cpu = SimDevice(capacity=1 << 20), make_device("cpu")
    chosen = options(sim)
    assert (chosen.decode, chosen.prefill) == ("full", "piecewise")
    assert chosen.full_sizes == (1, 2, 4, 8, 12, 16) and chosen.head_sizes == ()
    assert chosen.piecewise_sizes == (4, 8, 12, 16, 20, 24, 28, 32, 48)
    assert [(w.name, w.graphs_per_size) for w in chosen.wishes(3)] == [("full", 1), ("piecewise", 3)]
    both = options(sim, decode_graph="piecewise", decode_capture_sizes=[1, 2], prefill_capture_sizes=[2, 8])
    assert both.piecewise_sizes == (1, 2, 8) and both.head_sizes == (1, 2) and both.full_sizes == ()
    plain = options(cpu)
    assert (plain.decode, plain.prefill) == ("eager", "eager") and plain.wishes(3) == []
    with pytest.raises(ConfigError, match=r"decode_graph='full' is not allowed: one of eager, which"):
        options(cpu, decode_graph="full")
    with pytest.raises(ConfigError, match=r"prefill_graph='piecewise' is not allowed: one of eager"):
        options(cpu, prefill_graph="piecewise")
    uncut = options(sim, splitting_ops=[])
    assert (uncut.decode, uncut.prefill) == ("full", "eager")


def test_sizes_come_from_the_user_or_are_clamped():
    sim = SimDevice(capacity=1 << 20)
    with pytest.raises(ConfigError, match=r"decode_cap.* sizes from 1 to max_num_seqs=16, and 17"):
        options(sim, decode_capture_sizes=[1, 17])
    with pytest.raises(ConfigError, match=r"prefill_cap.* sizes from 1 to max_model_len=48, and 64"):
        options(sim, prefill_capture_sizes=[64])
    clamped = options(sim, max_capture_size=1000)
    assert clamped.full_sizes[-1] == 16 and clamped.piecewise_sizes[-1] == 48
    assert options(sim, max_capture_size=6).full_sizes == (1, 2, 4, 6)


def test_each_phase_may_have_its_own_largest_size():
    sim = SimDevice(capacity=1 << 20)
    chosen = options(sim, max_capture_size=6, max_prefill_capture_size=20)
    assert (chosen.full_sizes, chosen.piecewise_sizes) == ((1, 2, 4, 6), (4, 8, 12, 16, 20))
    assert options(sim, max_decode_capture_size=2).full_sizes == (1, 2)
    with pytest.raises(
        ConfigError, match="max_decode_capture_size=17 is not allowed: at most max_num_seqs=16"
    ):
        options(sim, max_decode_capture_size=17)
    with pytest.raises(
        ConfigError, match="max_prefill_capture_size=49 is not allowed: at most max_model_len=48"
    ):
        options(sim, max_prefill_capture_size=49)


@pytest.mark.parametrize("field", ["decode_capture_sizes", "max_prefill_capture_size"])
def test_sizes_that_capture_nothing_are_said_and_strictly_refused(field, caplog):
    cpu, value = make_device("cpu"), [4] if field.endswith("s") else 4
    options(cpu, **{field: value})
    assert f"{field}={value} captures nothing: {field.split('_')[1 if 'max' in field else 0]}" in caplog.text
    with pytest.raises(ConfigError, match=f"^{field}=.* is not allowed: no sizes where"):
        options(cpu, strict=True, **{field: value})


def test_default_sizes_that_are_clamped_are_logged(caplog):
    caplog.set_level("INFO", logger="piecework.capture")
    options(SimDevice(capacity=1 << 20))
    assert "decode is captured up to max_num_seqs=16, not up to 256" in caplog.text
    assert "prefill is captured up to max_model_len=48, not up to 4096" in caplog.text


def test_without_padding_every_batch_size_is_a_default_one():
    chosen = options(SimDevice(capacity=1 << 20), decode_padding=False, max_decode_capture_size=5)
    assert chosen.full_sizes == (1, 2, 3, 4, 5) and not chosen.decode_padding
    assert options(SimDevice(capacity=1 << 20), decode_padding=False).full_sizes == tuple(range(1, 17))
