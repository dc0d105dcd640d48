"""A device fails at compile, at the creation of a request, or in a run: what is asked of whom, exactly."""

from __future__ import annotations

import logging
import time

import pytest
import torch
from failsafe_rig import Rig, SimModel, trace

from piecework.errors import (
    ConfigError,
    DeviceError,
    DeviceLostError,
    ModelError,
    RequestError,
    WorkerLostError,
)
from piecework.failsafe.element import create
from piecework.failsafe.errors import ExhaustedError, is_device_error, loses_memory
from piecework.failsafe.events import Failure
from piecework.failsafe.failover import Failover
from piecework.failsafe.policy import Policy

X = torch.arange(4.0)
GRAPH = trace(lambda x: x * 2 + 1, X)
FIRST = ["compile:sim:0", "create:sim:0", "run:sim:0"]
SECOND = ["compile:sim:1", "create:sim:1", "run:sim:1"]
STAGES = ("compile", "create", "run")


def run_once(rig: Rig, policy: Policy | None = None):
    model = create(rig.names, rig.factory(GRAPH), policy)
    request = model.create_request()
    request.set_input(0, X)
    request.run()
    return model, request


@pytest.mark.parametrize("stage", STAGES)
def test_nothing_fails(stage):
    rig = Rig()
    model, request = run_once(rig)
    assert rig.events == FIRST
    assert (model.active_device, model.events, model.is_at_last_device) == ("sim:0", (), False)
    assert request.output(0).tolist() == [1, 3, 5, 7]


@pytest.mark.parametrize("stage", STAGES)
def test_the_next_device_takes_over(stage, caplog):
    failed = STAGES.index(stage)
    rig = Rig(faults={FIRST[failed]})
    model, request = run_once(rig)
    assert rig.events == FIRST[: failed + 1] + SECOND
    assert (model.active_device, model.execution_devices, model.is_at_last_device) == (
        "sim:1",
        ("sim:1",),
        True,
    )
    (event,) = model.events
    assert (event.source, event.target, event.stage, event.kind, event.done) == (
        "sim:0",
        "sim:1",
        stage,
        "DeviceError",
        True,
    )
    assert "planned at " + FIRST[failed] in event.reason and event.seconds >= 0
    assert request.output(0).tolist() == [1, 3, 5, 7]
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1 and "sim:1 took over" in warnings[0].message
    for _ in range(3):
        request.run()
    assert rig.events == FIRST[: failed + 1] + SECOND + ["run:sim:1"] * 3


@pytest.mark.parametrize("stage", STAGES)
def test_all_devices_fail(stage):
    failed = STAGES.index(stage)
    rig = Rig(faults={FIRST[failed], SECOND[failed]})
    with pytest.raises(ExhaustedError) as caught:
        run_once(rig)
    assert rig.events == FIRST[: failed + 1] + SECOND[: failed + 1]
    assert [(f.device, f.stage) for f in caught.value.failures] == [("sim:0", stage), ("sim:1", stage)]
    for event in (FIRST[failed], SECOND[failed]):
        assert f"planned at {event}" in str(caught.value)
    assert isinstance(caught.value.__cause__, DeviceError) and caught.value.__cause__.device == "sim:0"


def test_execution_devices_before_and_after():
    rig = Rig(faults={"run:sim:0"})
    model = create(rig.names, rig.factory(GRAPH))
    assert model.execution_devices == ("sim:0",)
    request = model.create_request()
    request.set_input(0, X)
    request.run()
    assert model.execution_devices == ("sim:1",)


def test_of_three_devices_the_middle_one_fails():
    rig = Rig(3, faults={"run:sim:0", "compile:sim:1"})
    model, _ = run_once(rig)
    assert rig.events == [*FIRST, "compile:sim:1", "compile:sim:2", "create:sim:2", "run:sim:2"]
    assert [(e.source, e.target, e.stage, e.done) for e in model.events] == [
        ("sim:0", "sim:1", "run", False),
        ("sim:1", "sim:2", "compile", True),
    ]


def test_exhausted_lists_all_reasons_each_with_its_stage():
    rig = Rig(3, faults={"run:sim:0", "compile:sim:1", "create:sim:2"})
    with pytest.raises(ExhaustedError) as caught:
        run_once(rig)
    assert [(f.device, f.stage) for f in caught.value.failures] == [
        ("sim:0", "run"),
        ("sim:1", "compile"),
        ("sim:2", "create"),
    ]


def test_one_device_has_no_wrapper_and_its_own_errors():
    rig = Rig(1)
    assert isinstance(create(rig.names, rig.factory(GRAPH)), SimModel)
    for stage in STAGES:
        with pytest.raises(DeviceError, match=f"planned at {stage}:sim:0"):
            run_once(Rig(1, faults={f"{stage}:sim:0"}))


def test_nothing_made_is_a_failure_of_the_device():
    with pytest.raises(DeviceError, match="device sim:0 failed at compile: the factory made nothing"):
        create(["sim:0"], lambda device: None)
    rig = Rig()
    make = rig.factory(GRAPH)
    model = create(rig.names, lambda device: None if device == "sim:0" else make(device))
    assert model.active_device == "sim:1" and "made nothing" in model.events[0].reason


def test_no_devices_and_no_factory_are_refused():
    with pytest.raises(ConfigError, match="at least one device"):
        create([], Rig().factory(GRAPH))
    with pytest.raises(ConfigError, match="factory"):
        create(["sim:0"], None)
    with pytest.raises(ConfigError, match="failover='always' is not allowed: one of off, compile, full"):
        Policy("always")


def test_the_switch_off_leaves_the_first_error_as_it_is():
    for stage in STAGES:
        rig = Rig(faults={f"{stage}:sim:0"})
        with pytest.raises(DeviceError, match=f"planned at {stage}:sim:0"):
            run_once(rig, Policy("off"))
        assert not any("sim:1" in event for event in rig.events)


def test_the_switch_compile_moves_what_is_made_and_not_what_runs():
    rig = Rig(3, faults={"compile:sim:0", "create:sim:1", "run:sim:2"})
    with pytest.raises(DeviceError, match="planned at run:sim:2"):
        run_once(rig, Policy("compile"))
    rig = Rig(faults={"run:sim:0"})
    with pytest.raises(DeviceError, match="planned at run:sim:0"):
        run_once(rig, Policy("compile"))
    assert rig.events == FIRST


@pytest.mark.parametrize("mistake", [RequestError("too long"), ModelError("no file"), TypeError("shape")])
def test_a_users_mistake_does_not_move(mistake):
    rig = Rig()

    def factory(device):
        raise mistake

    with pytest.raises(type(mistake)):
        create(rig.names, factory)
    model = create(rig.names, rig.factory(GRAPH))
    request = model.create_request()
    request.set_input(0, torch.zeros(2, 3, 5))
    request.set_output(0, torch.zeros(4))
    with pytest.raises(RuntimeError, match="must match"):
        request.run()
    assert model.active_device == "sim:0" and model.events == ()


def test_which_errors_are_a_devices():
    lost = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    for error in (
        DeviceError("x", "run", "gone"),
        lost,
        RuntimeError("CUDA error: lost"),
        ExhaustedError([]),
    ):
        assert is_device_error(error, "run")
    for error in (
        torch.OutOfMemoryError("CUDA out of memory"),
        DeviceError("x", "memory", "full"),
        MemoryError(),
    ):
        assert is_device_error(error, "compile") and not is_device_error(error, "run")
    missing = ConfigError("device", "cuda", "a machine with a GPU")
    assert is_device_error(missing, "compile") and not is_device_error(missing, "run")
    assert not is_device_error(ConfigError("dtype", "float8", "another"), "compile")
    assert not is_device_error(RuntimeError("a bug"), "run") and not is_device_error(
        KeyboardInterrupt(), "run"
    )


def test_after_which_errors_memory_is_lost():
    accelerator = torch.AcceleratorError("an illegal memory access was encountered")
    lost = DeviceLostError("x", "run", "gone")
    for error in (accelerator, lost, WorkerLostError("w", "died"), RuntimeError("HIP error: hang")):
        assert loses_memory(error)
        assert loses_memory(ExhaustedError([Failure.of("x", "run", error)]))
        wrapped = DeviceError("x", "run", "it failed")
        wrapped.__cause__ = error
        assert loses_memory(wrapped)
    for error in (
        DeviceError("x", "run", "planned"),
        RuntimeError("Exception from src/inference/src/cpp/infer_request.cpp:223"),
        ExhaustedError([Failure.of("x", "run", DeviceError("x", "run", "planned"))]),
    ):
        assert is_device_error(error, "run") and not loses_memory(error)


def test_what_a_move_takes_begins_with_letting_the_old_model_go():
    failover = Failover(["a", "b"], str, Policy(), retire=lambda model: time.sleep(0.05))
    failover.advance(0, "run", DeviceError("a", "run", "gone"))
    (event,) = failover.events
    assert 0.05 <= event.seconds < 5
