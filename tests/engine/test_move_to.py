"""An operator moves a server to another device and back, and no request loses a token."""

from __future__ import annotations

import pytest
from between_steps import asked_after

from piecework.engine.offline import run_requests
from piecework.errors import DeviceError, RequestError
from piecework.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=12)
SEEDED = GREEDY.with_changes(temperature=0.9, seed=3)
PROMPTS, PARAMS = [[7 + i % 90 for i in range(40)], [5, 6, 7]], [GREEDY, SEEDED]
SMALL = {
    "chunk_size": 16,
    "num_pages": 40,
    "compilation_config": {"decode_capture_sizes": [1], "prefill_capture_sizes": [16]},
}


def collect(service, then=None):
    """Tokens of each prompt; see `asked_after` for `then`."""
    tokens = {0: [], 1: []}
    with asked_after(service, then or {}):
        for number, delta in run_requests(service, PROMPTS, PARAMS):
            assert delta.finish_reason in (None, "length"), delta.error
            tokens[number].extend(delta.token_ids)
    return tokens


def moves(service):
    return [(event.source, event.target, event.stage) for event in service.failovers()]


def test_running_requests_move_there_and_back_and_lose_nothing(make_service):
    service = make_service(device="sim,cpu", **SMALL)
    clean, seen = collect(service), []

    def go(device):
        service.move_to(device)
        seen.append((service.device_name, service.health()["status"], service.runner.device.name))

    assert collect(service, {5: lambda: go("cpu"), 12: lambda: go("sim")}) == clean
    assert seen == [("cpu", "degraded", "cpu"), ("sim", "ok", "sim")]
    assert moves(service) == [("sim", "cpu", "asked"), ("cpu", "sim", "asked")]
    service.move_to("sim")
    assert len(moves(service)) == 2
    with pytest.raises(RequestError, match="device='npu' is not allowed: one of sim, cpu") as refused:
        service.move_to("npu")
    assert refused.value.param == "device"


@pytest.mark.slow
def test_a_device_that_recovered_serves_again_and_may_fail_again(make_service):
    service = make_service(device="sim,cpu", inject_fault="point=run,step=5", **SMALL)
    tokens = collect(service)
    assert service.device_name == "cpu"
    service.move_to("sim")
    assert service.health()["status"] == "ok"
    assert collect(service) == tokens
    assert moves(service) == [("sim", "cpu", "run"), ("cpu", "sim", "asked"), ("sim", "cpu", "run")]


def test_where_the_other_device_cannot_load_all_stays(make_service):
    service = make_service(device="sim,cpu", inject_fault="point=compile,device=1", **SMALL)
    runner = service.runner

    def refused():
        with pytest.raises(DeviceError, match="planned fault at compile"):
            service.move_to("cpu")

    tokens = collect(service, {3: refused})
    assert service.runner is runner and moves(service) == [] and service.health()["status"] == "ok"
    assert collect(service) == tokens


@pytest.mark.slow
def test_without_failover_an_operator_can_still_move(make_service):
    service = make_service(device="sim,cpu", failover="off", **SMALL)
    clean = collect(service)
    assert collect(service, {5: lambda: service.move_to("cpu")}) == clean
    assert moves(service) == [("sim", "cpu", "asked")]


@pytest.mark.slow
def test_after_an_audit_failed_an_operator_can_go_back_and_audits_go_on(make_service):
    fault = "point=run,step=4,kind=wrong"
    service = make_service(device="sim", inject_fault=fault, audit_device="cpu", audit_every=1, **SMALL)
    tokens = collect(service)
    assert (service.device_name, service.audit().missed) == ("cpu", 1)
    service.move_to("sim")
    assert (service.device_name, service.health()["status"]) == ("sim", "ok")
    assert collect(service) == tokens
    assert (service.device_name, service.audit().missed) == ("cpu", 2)
    assert moves(service) == [("sim", "cpu", "audit"), ("cpu", "sim", "asked"), ("sim", "cpu", "audit")]
