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
        ("point=run,kind=sulk", "one of error, hang, abort, nan"),
        ("point=run,step=x", "a whole number as step"),
        ("point=compile,kind=nan", "nothing runs"),
        ("point=run,device=2", "a device below 2"),
    ],
)
def test_what_cannot_happen_is_refused(text, allowed):
    with pytest.raises(ConfigError, match=r"inject_fault=.*" + allowed):
        read_faults(text, 2)
