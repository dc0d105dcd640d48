"""Faults that a user plans happen on any device, where they are planned."""

from __future__ import annotations

import pytest
import torch

from piecework.compile.base import FunctionPiece
from piecework.devices import make_device
from piecework.devices.injected import PlannedFault, read_faults
from piecework.errors import ConfigError, DeviceError

DOUBLE = FunctionPiece(lambda x: (x * 2,), "test")


@pytest.mark.parametrize("name", ["cpu", "sim", "sim:host"])
def test_a_step_fails_and_the_others_do_not(name):
    device = make_device(name, read_faults("point=run,step=2", 1))
    plain = make_device(name)
    assert isinstance(device, type(plain)) and device.name == plain.name and device.captures == plain.captures
    for step in (0, 1, 3):
        device.notify("step", step)
    with pytest.raises(DeviceError, match=f"device {device.name} failed at step: planned fault at step 2"):
        device.notify("step", 2)


@pytest.mark.parametrize("name", ["cpu", "sim"])
def test_a_piece_of_a_step_fails_and_those_before_it_run(name):
    device = make_device(
        name, read_faults("point=run, step=1, piece=2; point=run,step=3,piece=0,kind=nan", 1)
    )
    assert not device.captures and not device.chains
    x = device.place(torch.ones(2))
    ran = []
    for step in range(4):
        device.notify("step", step)
        for piece in range(3):
            try:
                (result,) = device.launch(DOUBLE, [x])
                ran.append((step, piece, bool(result.isnan().all())))
            except DeviceError as error:
                assert (step, piece) == (1, 2) and "at piece 2" in str(error)
    assert (3, 0, True) in ran and [entry for entry in ran if entry[2]] == [(3, 0, True)]
    assert len(ran) == 11


def test_results_of_a_step_become_nan():
    device = make_device("cpu", read_faults("point=run,step=1,kind=nan", 1))
    results = [torch.zeros(3) for _ in range(3)]
    for step, result in enumerate(results):
        device.notify("step", step)
        device.notify("done", step, [result])
    assert [bool(r.isnan().all()) for r in results] == [False, True, False]


@pytest.mark.parametrize("kind", ["nan", "wrong"])
def test_wrong_numbers_are_where_they_are_planned_and_go_on(kind):
    def after(where, step=4):
        """Hidden states, logits and a page of cache after a step in which each value is its column."""
        device = make_device("sim", read_faults(f"point=run,step=3+,kind={kind},where={where}", 1))
        tensors = [device.place(torch.arange(4.0).expand(2, 4).contiguous()) for _ in range(3)]
        device.notify("step", step)
        device.notify("done", step, tensors[:2])
        assert device.watches_cache == (where == "cache")
        if device.watches_cache:
            device.notify("cache", 0, tensors[2:])
        return tensors

    good = torch.arange(4.0).expand(2, 4)
    bad = torch.full((2, 4), torch.nan) if kind == "nan" else good.roll(1, -1)
    half = torch.cat([good[:1], bad[1:]])
    for where, expected in (
        ("results", (bad, bad, good)),
        ("row", (good, half, good)),
        ("cache", (good, good, bad)),
        ("replay", (good, good, good)),  # nothing was replayed
    ):
        for found, wanted in zip(after(where), expected, strict=True):
            torch.testing.assert_close(found, wanted, equal_nan=True)
        for found in after(where, step=2):
            torch.testing.assert_close(found, good)


def test_a_replay_is_wrong_and_the_same_step_without_one_is_not():
    device = make_device("sim", read_faults("point=run,step=1+,kind=wrong,where=replay", 1))
    x, pool = device.place(torch.arange(4.0)), device.new_pool()
    graph, _ = device.capture(lambda: x.mul_(1.0), pool)
    for replays, expected in ((1, [3.0, 0.0, 1.0, 2.0]), (0, [3.0, 0.0, 1.0, 2.0])):
        device.notify("step", 2)
        for _ in range(replays):
            graph.replay()
        device.notify("done", 2, [x])
        assert x.tolist() == expected
    graph.release()
    with pytest.raises(ConfigError, match=r"where=replay.*cpu captures no graphs"):
        make_device("cpu", read_faults("point=run,kind=nan,where=replay", 1))


def test_faults_belong_to_places_in_the_list():
    text = "point=compile,device=1,piece=5;point=run,kind=hang"
    assert read_faults(text, 2) == [PlannedFault("compile", 1, piece=5), PlannedFault("run", kind="hang")]
    assert read_faults(None, 1) == []


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("run", "point="),
        ("point=run,point=run", "each at most once"),
        ("point=run,where=here", "point="),
        ("point=boot", "one of compile, run"),
        ("point=run,kind=sulk", "one of error, lost, hang, abort, nan, wrong"),
        ("point=run,step=x", "a whole number as step"),
        ("point=run,step=+", "a whole number as step"),
        ("point=run,kind=nan,where=here", "one of results, row, cache, replay"),
        ("point=run,where=row", "for kind=nan or kind=wrong"),
        ("point=run,kind=wrong,where=cache,piece=1", "without a piece"),
        ("point=compile,kind=nan", "nothing runs"),
        ("point=run,device=2", "a device below 2"),
    ],
)
def test_what_cannot_happen_is_refused(text, allowed):
    with pytest.raises(ConfigError, match=r"inject_fault=.*" + allowed):
        read_faults(text, 2)
