"""A device that gives wrong numbers without an error is found within so many steps, and left."""

from __future__ import annotations

import logging

import pytest

from piecework.engine.offline import run_requests
from piecework.errors import ConfigError
from piecework.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=20)
PROMPTS = [[7 + i % 90 for i in range(40)], [5, 6, 7], [8, 9]]
EVERY = 4
SMALL = {
    "chunk_size": 16,
    "num_pages": 80,
    "audit_device": "cpu",
    "audit_every": EVERY,
    "compilation_config": {"decode_capture_sizes": [1, 4], "prefill_capture_sizes": [16]},
}


def collect(service, prompts=PROMPTS, params=GREEDY):
    """Tokens of each prompt."""
    tokens = {}
    for number, delta in run_requests(service, prompts, params):
        tokens.setdefault(number, []).extend(delta.token_ids)
        assert delta.finish_reason in (None, "length"), delta.error
    return [tokens[number] for number in range(len(prompts))]


@pytest.fixture(scope="module")
def plain(folder):
    """A service on the CPU without an audit."""
    from piecework.config import EngineConfig
    from piecework.engine.service import Service

    service = Service(EngineConfig.from_flat({"model": str(folder), "dtype": "float32", "threads": 1}))
    yield service
    service.close()


@pytest.fixture(scope="module")
def clean(plain):
    return collect(plain)


def common(a, b):
    """How many tokens two sequences begin with in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def test_a_good_device_stays(make_service, clean):
    service = make_service(device="sim", **SMALL)
    assert collect(service) == clean
    report = service.audit()
    assert report.good >= 20 // EVERY and (report.missed, report.skipped) == (0, 0)
    assert report.greatest < 1e-4
    assert service.failovers() == () and service.health()["status"] == "ok"
    assert service.graph_counters()["body"]["replays"] > 0
    before = report.good
    assert collect(service) == clean and service.audit().good > before  # from known pages, on both sides


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("step=9+,kind=wrong", marks=pytest.mark.slow),
        "step=9+,kind=wrong,where=row",
        "step=9,kind=wrong,where=cache",
        pytest.param("step=9+,kind=wrong,where=replay", marks=pytest.mark.slow),
        pytest.param("step=9,kind=nan,where=cache", marks=pytest.mark.slow),
    ],
)
def test_wrong_numbers_are_found_within_so_many_steps_and_then_tokens_are_right(
    make_service, plain, clean, caplog, fault
):
    service = make_service(device="sim", inject_fault=f"point=run,{fault}", **SMALL)
    tokens = collect(service)
    (event,) = service.failovers()
    assert (event.source, event.target, event.stage, event.kind) == ("sim", "cpu", "audit", "AuditMissError")
    report = service.audit()
    assert report.missed == 1 and not report.greatest < 0.05
    assert (service.device_name, service.health()["status"]) == ("cpu", "degraded")
    assert [r.levelno for r in caplog.records if r.name == "piecework.failsafe"] == [logging.WARNING]
    for prompt, found, expected in zip(PROMPTS, tokens, clean, strict=True):
        # What was sent in the steps before the audit stays; what follows is what the CPU makes of it.
        right = common(found, expected)
        sent = min(right + EVERY - 1, len(found)) if right < len(found) else right
        if sent < len(found):
            params = GREEDY.with_changes(max_tokens=len(found) - sent)
            assert collect(plain, [prompt + found[:sent]], params) == [found[sent:]]
    assert tokens == clean or ("nan" not in fault and common(tokens[-1], clean[-1]) >= 8)
    assert collect(service) == clean  # new ones start on the reference
    assert service.audit().missed == 1 and len(service.failovers()) == 1


@pytest.mark.slow
def test_a_device_that_is_wrong_from_the_start_says_nothing(make_service, clean):
    service = make_service(device="sim", inject_fault="point=run,step=0+,kind=wrong", **SMALL)
    assert collect(service) == clean
    assert service.audit().missed == 1 and service.device_name == "cpu"


@pytest.mark.slow
def test_a_glitch_between_two_audits_is_not_seen_and_one_on_the_third_step_is(make_service, clean):
    fault = "point=run,step=2,kind=wrong,where=row"
    service = make_service(device="sim", inject_fault=fault, **SMALL | {"audit_every": 3})
    collect(service, [[5, 6, 7]])
    assert service.audit().missed == 0 and service.device_name == "sim"
    service = make_service(device="sim", inject_fault=fault, **SMALL | {"audit_every": 2})
    assert collect(service, [[5, 6, 7]]) == [clean[1]]  # the third step's token was never sent
    assert service.audit().missed == 1 and service.device_name == "cpu"


@pytest.mark.slow
def test_the_policy_warn_only_warns(make_service, caplog):
    fault = "point=run,step=0+,kind=wrong"
    service = make_service(device="sim", inject_fault=fault, audit_policy="warn", **SMALL)
    collect(service)
    report, health = service.audit(), service.health()
    assert report.missed > 1 and service.device_name == "sim" and service.failovers() == ()
    told = [r.levelno for r in caplog.records if r.name == "piecework.failsafe"]
    assert told.count(logging.WARNING) == 1 and len(told) == report.missed
    assert {event["stage"] for event in health["events"]} == {"audit"}


@pytest.mark.slow
def test_it_audits_what_a_failover_has_moved_to(make_service, clean):
    fault = "point=run,step=3; point=run,device=1,step=6+,kind=wrong"
    service = make_service(device="sim,sim:host", inject_fault=fault, **SMALL | {"audit_every": 1})
    assert collect(service) == clean
    stages = [(event.source, event.target, event.stage) for event in service.failovers()]
    assert stages == [("sim", "sim:host", "run"), ("sim:host", "cpu", "audit")]


def test_a_step_that_fails_leaves_its_audit_to_the_next(make_service, clean):
    settings = {**SMALL, "audit_every": 1000}  # only the first step is due
    service = make_service(device="sim", inject_fault="point=run,device=0,step=0", **settings)
    with pytest.raises(AssertionError, match="planned fault at step 0"):
        collect(service, [[5, 6, 7]])
    assert collect(service) == clean
    assert service.audit().good == 1


@pytest.mark.slow
def test_a_reference_that_fails_ends_the_audit_and_nothing_else(make_service, clean, caplog, monkeypatch):
    service = make_service(device="sim", **SMALL)

    def fail(*arguments):
        raise RuntimeError("the reference is broken")

    monkeypatch.setattr(service._runners.reference.runner.graphs, "run", fail)
    assert collect(service) == clean
    assert (service.audit().good, service.audit().skipped) == (0, 1)
    (warning,) = [r.getMessage() for r in caplog.records if r.name == "piecework.failsafe"]
    assert "the reference cpu failed, nothing is audited any more" in warning


@pytest.mark.slow
def test_a_worker_in_a_process_is_audited_from_here(make_service, clean):
    fault = "point=run,step=9+,kind=wrong,where=row"
    service = make_service(device="sim", workers="process", **SMALL)
    assert collect(service) == clean and service.audit().good >= 20 // EVERY
    service = make_service(device="sim", workers="process", inject_fault=fault, **SMALL)
    collect(service)
    assert service.audit().missed == 1 and service.device_name == "cpu"
    assert collect(service) == clean


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"audit_device": "toaster"}, "device='toaster'"),
        ({"audit_device": "cpu,sim"}, "audit_device='cpu,sim' is not allowed: one device"),
        ({"audit_every": 0}, "audit_every=0"),
        ({"audit_threshold": -1.0}, "audit_threshold=-1.0"),
        ({"audit_policy": "shrug"}, "audit_policy='shrug'"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_is_loaded(make_service, settings, message):
    with pytest.raises(ConfigError, match=message):
        make_service(device="sim", **settings)
