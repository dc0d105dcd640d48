"""Planned faults happen where they are planned."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest
import torch

from piecework.devices.sim import Fault, SimDevice
from piecework.errors import ConfigError, DeviceError


def device(*faults: Fault) -> SimDevice:
    return SimDevice(capacity=1 << 20, faults=faults)


def test_an_error_names_device_point_and_number():
    sim = device(Fault("compile", 1), Fault("step", 3))
    sim.notify("compile", 0)
    with pytest.raises(
        DeviceError, match="device sim failed at compile: planned fault at compile 1"
    ) as caught:
        sim.notify("compile", 1)
    assert (caught.value.device, caught.value.point) == ("sim", "compile")
    sim.notify("step", 1)
    with pytest.raises(DeviceError, match="step 3"):
        sim.notify("step", 3)


def test_the_capture_that_is_planned_fails_and_the_next_one_works():
    sim = device(Fault("capture", 1))
    x = sim.zeros((2,), torch.float32)
    sim.capture(lambda: x + 1, sim.new_pool())
    with pytest.raises(DeviceError, match="capture 1"):
        sim.capture(lambda: x + 1, sim.new_pool())
    sim.capture(lambda: x + 1, sim.new_pool())


def test_results_of_one_step_are_spoiled():
    sim = device(Fault("step", 0, "nan"), Fault("step", 2, "wrong"))
    results = [torch.zeros(2) for _ in range(3)]
    for step, result in enumerate(results):
        sim.notify("step", step)
        sim.notify("done", step, [result])
    assert bool(results[0].isnan().all()) and results[1].tolist() == [0, 0] and results[2].tolist() == [1, 1]


def test_a_hang_lasts_until_it_is_released():
    sim = device(Fault("step", 0, "hang"))
    done = threading.Event()
    thread = threading.Thread(target=lambda: (sim.notify("step", 0), done.set()), daemon=True)
    thread.start()
    assert not done.wait(0.2)
    sim.faults.release()
    assert done.wait(10)
    thread.join()


def test_an_abort_ends_the_process():
    code = "from piecework.devices.sim import *\n"
    code += "SimDevice(capacity=4096, faults=[Fault('step', 0, 'abort')]).notify('step', 0)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert ended.returncode == -signal.SIGABRT


def test_a_plan_that_cannot_happen_is_refused():
    with pytest.raises(ConfigError, match=r"fault\.point='boot' is not allowed: one of compile, capture"):
        Fault("boot", 0)
    with pytest.raises(ConfigError, match=r"fault\.kind='sulk' is not allowed: one of error, lost, hang"):
        Fault("step", 0, "sulk")
    with pytest.raises(ConfigError, match="only a step has results"):
        Fault("capture", 0, "nan")
