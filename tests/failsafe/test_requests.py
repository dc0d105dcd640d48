"""Requests keep what is bound to them, whoever moves the model and whenever."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from failsafe_rig import Rig, trace
from hypothesis import given, settings
from hypothesis import strategies as st

from piecework.failsafe.aliases import written_inputs
from piecework.failsafe.element import create
from piecework.failsafe.errors import ExhaustedError, RetryRefusedError
from piecework.failsafe.policy import Policy

X = torch.arange(4.0)
GRAPH = trace(lambda x: x * 2 + 1, X)


def bound(model, x, out=None):
    request = model.create_request()
    request.set_input(0, x)
    if out is not None:
        request.set_output(0, out)
    return request


def test_a_users_output_buffer_keeps_its_identity_and_gets_the_result():
    rig = Rig(faults={"run:sim:0"})
    out = torch.zeros(4)
    request = bound(create(rig.names, rig.factory(GRAPH)), X.clone(), out)
    address = out.data_ptr()
    request.run()
    assert request.output(0) is out and out.data_ptr() == address and out.tolist() == [1, 3, 5, 7]
    assert len(rig.seen) == 2 and rig.seen[0] == rig.seen[1]  # both devices saw the caller's own storage


def test_siblings_keep_their_bindings_when_another_one_moves():
    rig = Rig()
    model = create(rig.names, rig.factory(GRAPH))
    outs = [torch.zeros(4) for _ in range(3)]
    requests = [bound(model, X + 10 * i, out) for i, out in enumerate(outs)]
    for request in requests:
        request.run()
    rig.faults.add("run:sim:0")
    for out in outs:
        out.zero_()
    requests[1].run()
    requests[0].run()
    requests[2].run()
    assert [out.tolist() for out in outs] == [((X + 10 * i) * 2 + 1).tolist() for i in range(3)]
    assert rig.events.count("compile:sim:1") == 1 and rig.events.count("run:sim:0") == 4


def test_chained_requests_stay_chained():
    rig = Rig()
    first = create(rig.names, rig.factory(GRAPH))
    second = create(rig.names, rig.factory(trace(lambda x: x - 5, X), ":1"))
    a = bound(first, X.clone())
    a.run()
    b = bound(second, a.output(0))
    b.run()
    assert b.output(0).tolist() == [-4, -2, 0, 2]
    rig.faults.add("run:sim:0")
    a.set_input(0, X + 1)
    a.run()
    b.run()
    assert b.output(0).tolist() == [-2, 0, 2, 4] and b.output(0) is b.output(0)
    assert (first.active_device, second.active_device) == ("sim:1", "sim:0")


def test_two_inputs_and_two_outputs_are_bound_by_place():
    graph = trace(lambda left, right: (left - right, left + right), X, X.clone())
    rig = Rig(faults={"run:sim:0"})
    request = create(rig.names, rig.factory(graph)).create_request()
    outs = [torch.zeros(4), torch.zeros(4)]
    request.set_output(1, outs[1])
    request.set_input(1, X)
    request.set_input(0, X * 3)
    request.set_output(0, outs[0])
    request.run()
    assert [out.tolist() for out in outs] == [(X * 2).tolist(), (X * 4).tolist()]


def test_two_threads_fail_together_and_move_once():
    rig = Rig(3)
    model = create(rig.names, rig.factory(GRAPH))
    requests = [bound(model, X + i, torch.zeros(4)) for i in range(2)]
    together, happen = threading.Barrier(2), rig.happen

    def both_fail(stage, device, piece=""):
        if (stage, device) == ("run", "sim:0"):
            together.wait(30)
        happen(stage, device, piece)

    rig.happen, rig.faults = both_fail, {"run:sim:0"}
    threads = [threading.Thread(target=request.run) for request in requests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert model.active_device == "sim:1" and len(model.events) == 1
    assert rig.events.count("compile:sim:1") == 1 and "compile:sim:2" not in rig.events
    assert [request.output(0).tolist() for request in requests] == [
        (2 * (X + i) + 1).tolist() for i in range(2)
    ]


def test_readers_do_not_wait_for_a_compile():
    rig = Rig(faults={"run:sim:0"})
    compiling, go = threading.Event(), threading.Event()
    make = rig.factory(GRAPH)

    def factory(device):
        if device == "sim:1":
            compiling.set()
            assert go.wait(60)
        return make(device)

    model = create(rig.names, factory)
    request = bound(model, X)
    thread = threading.Thread(target=request.run)
    thread.start()
    assert compiling.wait(60)
    # This very thread reads, while the other one compiles: it would hang here if it had to wait.
    assert (model.active_device, model.events, model.execution_devices) == ("sim:0", (), ("sim:0",))
    go.set()
    thread.join(60)
    assert model.active_device == "sim:1" and request.output(0).tolist() == [1, 3, 5, 7]


def test_a_transient_error_on_the_last_device_recovers():
    rig = Rig(faults={"run:sim:0", "run:sim:1"})
    model = create(rig.names, rig.factory(GRAPH))
    request = bound(model, X)
    with pytest.raises(ExhaustedError):
        request.run()
    rig.faults.clear()
    request.run()
    assert request.output(0).tolist() == [1, 3, 5, 7]
    assert rig.events[-2:] == ["run:sim:1"] * 2 and model.active_device == "sim:1"


def test_what_only_failover_needs_is_released_at_the_last_device_and_a_later_failure_is_clear():
    rig = Rig(faults={"run:sim:0"})
    graph = trace(lambda x: x * 3, X)
    source = weakref.ref(graph)
    model = create(rig.names, rig.factory(graph))
    request = bound(model, X)
    del graph
    gc.collect()
    assert source() is not None
    request.run()
    gc.collect()
    assert source() is None and request.output(0).tolist() == (X * 3).tolist()
    rig.faults.add("run:sim:1")
    with pytest.raises(ExhaustedError, match=r"sim:0 at run .*sim:1 at run"):
        request.run()


def test_a_run_that_writes_its_input_is_not_repeated_without_a_snapshot():
    rig = Rig(faults={"run:sim:0", "spoil"})
    state = X.clone()
    model = create(rig.names, rig.factory(GRAPH))
    request = bound(model, state, state)
    with pytest.raises(RetryRefusedError, match=r"writes its inputs \[0\] in place, so sim:1"):
        request.run()
    assert rig.events[-1] == "compile:sim:1" and model.active_device == "sim:1"
    rig.faults.clear()
    state.copy_(X)
    request.run()
    assert state.tolist() == [1, 3, 5, 7]


@pytest.mark.parametrize("declared", [False, True])
def test_with_a_snapshot_it_is_repeated_on_what_was_there(declared):
    rig = Rig(faults={"run:sim:0", "spoil"})
    state = X.clone()
    mutated = (0,) if declared else ()
    model = create(rig.names, rig.factory(GRAPH, mutated=mutated), Policy(snapshot=True))
    request = bound(model, state, None if declared else state)
    happen = rig.happen

    def only_once(stage, device, piece=""):
        if stage == "run":
            rig.faults.discard("spoil")
        happen(stage, device, piece)

    rig.happen = only_once
    request.run()
    assert request.output(0).tolist() == [1, 3, 5, 7]


@given(st.integers(0, 8), st.integers(1, 8), st.integers(0, 8), st.integers(1, 8), st.integers(1, 2))
@settings(max_examples=60, deadline=None)
def test_inputs_that_share_memory_with_outputs_are_found(a, n, b, m, step):
    memory = torch.zeros(32)
    left = memory[a : a + n * step : step]
    right = memory[b : b + m]
    touched = set(range(a, a + (n - 1) * step + 1)) & set(range(b, b + m))
    assert written_inputs({7: left}, {0: right}, ()) == ([7] if touched else [])


def test_thirty_failures_in_any_order_leave_every_request_right():
    """Devices fail one after the other while requests run in turn; each result is that of its own input."""
    rig = Rig(6)
    model = create(rig.names, rig.factory(GRAPH))
    requests = [bound(model, X + i, torch.zeros(4)) for i in range(3)]
    for turn in range(30):
        if turn % 6 == 5:
            rig.faults.add(f"run:{model.active_device}")
        request = requests[turn % 3]
        request.output(0).zero_()
        request.run()
        assert request.output(0).tolist() == ((X + turn % 3) * 2 + 1).tolist()
    assert model.active_device == "sim:5" and len(model.events) == 5
