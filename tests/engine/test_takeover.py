"""A device fails in the middle of everything, and no client can tell."""

from __future__ import annotations

import gc
import logging
import threading
import weakref

import pytest
import torch

from piecework.engine.offline import run_requests
from piecework.errors import ConfigError, DeviceError, EngineDeadError
from piecework.failsafe.errors import ExhaustedError
from piecework.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=10)
SEEDED = GREEDY.with_changes(temperature=0.9, top_p=0.95, seed=11, repetition_penalty=1.1, n=2)
LONG = [7 + i % 90 for i in range(40)]
PROMPTS = [LONG, [5, 6, 7], [8, 9]]
PARAMS = [GREEDY, GREEDY.with_changes(max_tokens=6, logprobs=2), SEEDED]
SMALL = {
    "chunk_size": 16,
    "compilation_config": {"decode_capture_sizes": [1, 4], "prefill_capture_sizes": [16]},
    "num_pages": 80,
}
STEPS = 3 + 10 - 1  # chunks of the long prompt, and what it generates


def collect(service, prompts=PROMPTS, params=PARAMS):
    """Tokens of each sample in the order in which they came, the last delta of each, and texts."""
    tokens, last, texts = {}, {}, {}
    for number, delta in run_requests(service, prompts, params):
        key = (number, delta.index)
        tokens.setdefault(key, []).extend(delta.token_ids)
        texts[key] = texts.get(key, "") + delta.text
        assert not (key in last and last[key].finish_reason)
        last[key] = delta
    return tokens, last, texts


@pytest.fixture(scope="module")
def clean(folder):
    from piecework.config import EngineConfig
    from piecework.engine.service import Service

    service = Service(
        EngineConfig.from_flat({"model": str(folder), "dtype": "float32", "threads": 1, **SMALL})
    )
    tokens, _, texts = collect(service)
    service.close()
    return tokens, texts


@pytest.mark.parametrize(
    "step",
    [pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(STEPS - 1, marks=pytest.mark.slow)],
    ids=["chunk of a prompt", "decode", "last"],
)
def test_clients_see_the_tokens_of_a_clean_run_whichever_step_fails(make_service, clean, caplog, step):
    fault = f"point=run,device=0,step={step}"
    service = make_service(device="sim,cpu", inject_fault=fault, **SMALL)
    tokens, last, texts = collect(service)
    assert (tokens, texts) == clean
    assert {delta.finish_reason for delta in last.values()} == {"length"}
    assert last[(1, 0)].usage.completion_tokens == 6
    health = service.health()
    assert (health["status"], health["device"], service.device_name) == ("degraded", "cpu", "cpu")
    (event,) = health["events"]
    assert (event["from"], event["to"], event["stage"], event["done"]) == ("sim", "cpu", "run", True)
    assert f"planned fault at step {step}" in event["reason"]
    moved = [r for r in caplog.records if r.name == "piecework.failsafe"]
    assert [r.levelno for r in moved] == [logging.WARNING]
    service.close()
    stats = service.stats()
    assert (stats.kv_pages_used, stats.preemptions_total) == (0, 0)
    assert stats.generation_tokens_total == sum(map(len, tokens.values()))


@pytest.mark.slow
def test_what_the_old_device_held_is_let_go_and_the_next_requests_just_run(make_service):
    service = make_service(device="sim,cpu", inject_fault="point=run,device=0,step=2", **SMALL)
    held = [
        weakref.ref(t)
        for t in (*service.runner.cache.tensors().values(), *service.runner.programs.model.parameters())
    ]
    assert service.graph_counters()["body"]["captures"] > 0
    tokens, _, _ = collect(service, [[5, 6, 7]], GREEDY)
    gc.collect()
    assert held and all(ref() is None for ref in held)
    assert service.runner.device.name == "cpu" and service.graph_counters()["body"]["chained_runs"] > 0
    again, _, _ = collect(service, [[5, 6, 7]], GREEDY)
    assert again == tokens and len(service.failovers()) == 1


@pytest.mark.slow
def test_a_request_that_can_never_fit_the_next_device_says_so_and_others_go_on(make_service, monkeypatch):
    from piecework.runner import load as loading

    made = loading.make_cache
    service = make_service(device="sim,cpu", inject_fault="point=run,device=0,step=5", **SMALL)

    def less(model, config, *rest):
        """The device that takes over has four pages of 16 tokens."""
        return made(model, config.__class__.from_flat({"num_pages": 5}), *rest)

    monkeypatch.setattr(loading, "make_cache", less)
    params = [GREEDY.with_changes(max_tokens=60), GREEDY, GREEDY.with_changes(max_tokens=None)]
    tokens, last, _ = collect(service, [LONG, [5, 6, 7], [8, 9]], params)
    assert last[(0, 0)].finish_reason == "error"
    assert "cpu took over and has room for 64 tokens; this request may need 100" in last[(0, 0)].error
    assert (last[(1, 0)].finish_reason, len(tokens[(1, 0)])) == ("length", 10)
    assert (last[(2, 0)].finish_reason, len(tokens[(2, 0)])) == ("length", 62)
    service.close()
    assert service.max_model_len == 64 and service.stats().kv_pages_used == 0


def test_when_all_devices_failed_everything_ends_with_the_one_error(make_service):
    fault = "point=run,device=0,step=4; point=compile,device=1"
    service = make_service(device="sim,cpu", inject_fault=fault, **SMALL)
    _, last, _ = collect(service)
    for delta in last.values():
        assert delta.finish_reason == "error"
        assert "sim at run (DeviceError: planned fault at step 4)" in delta.error
        assert "cpu at compile (DeviceError: planned fault at compile 0)" in delta.error
    with pytest.raises(EngineDeadError, match="all devices failed: sim at run"):
        service.submit([5], GREEDY, listener=lambda delta: None)
    assert service.health()["status"] == "dead"


def test_what_arrives_while_the_last_device_fails_ends_too(make_service, monkeypatch):
    from piecework.runner import failover

    service = make_service(device="sim,cpu", inject_fault="point=run,device=0,step=1", **SMALL)
    late = []

    def load(*arguments, **options):
        service.submit([5], GREEDY, listener=late.append)
        raise DeviceError("cpu", "memory", "full")

    monkeypatch.setattr(failover, "load", load)
    _, last, _ = collect(service, [[5, 6, 7]], GREEDY)
    assert last[(0, 0)].finish_reason == "error" and "cpu at compile" in last[(0, 0)].error
    service.close()
    assert [delta.finish_reason for delta in late] == ["error"]


@pytest.mark.slow
def test_a_transient_error_of_the_last_device_costs_its_step_and_no_more(make_service, clean):
    fault = "point=run,device=0,step=1; point=run,device=1,step=2"
    service = make_service(device="sim,cpu", inject_fault=fault, **SMALL)
    _, last, _ = collect(service, [[5, 6, 7]], GREEDY)
    assert last[(0, 0)].finish_reason == "error" and "all devices failed" in last[(0, 0)].error
    tokens, last, _ = collect(service, [[5, 6, 7]], GREEDY.with_changes(max_tokens=6))
    assert last[(0, 0)].finish_reason == "length" and tokens[(0, 0)] == clean[0][(1, 0)]


def test_requests_may_be_cancelled_and_added_while_the_next_device_loads(make_service, monkeypatch, clean):
    from piecework.runner import failover

    loading, go, load = threading.Event(), threading.Event(), failover.load
    service = make_service(device="sim,cpu", inject_fault="point=run,device=0,step=5", **SMALL)

    def slow(*arguments, **options):
        loading.set()
        assert go.wait(120)
        return load(*arguments, **options)

    monkeypatch.setattr(failover, "load", slow)
    ended: dict[str, str | None] = {}
    done = threading.Event()

    def listener(name):
        def listen(delta):
            if delta.finish_reason:
                ended[name] = delta.finish_reason
                if len(ended) == 3:
                    done.set()

        return listen

    with service.at_once():
        service.submit(LONG, GREEDY, request_id="long", listener=listener("long"))
        service.submit([5, 6, 7], GREEDY, request_id="short", listener=listener("short"))
    assert loading.wait(120)
    service.abort("long")
    service.submit([8, 9], GREEDY, request_id="new", listener=listener("new"))
    health = service.health()
    assert (health["status"], health["device"]) == ("degraded", "sim")
    assert service.graph_counters()["body"]["pieces"] > 0
    go.set()
    assert done.wait(120)
    assert ended == {"long": "abort", "short": "length", "new": "length"}


def test_a_piece_that_fails_in_a_step_moves_alone(make_service, clean, caplog):
    fault = "point=run,device=0,step=7,piece=2"
    service = make_service(device="sim,cpu", inject_fault=fault, **SMALL)
    runner, cache = service.runner, service.runner.cache.tensors()
    tokens, _, texts = collect(service)
    assert (tokens, texts) == clean
    body = service.graph_counters()["body"]
    assert (body["pieces"], body["distinct"], body["moved_pieces"], body["compiles"]) == (4, 3, 1, 3)
    assert [piece.moved for piece in runner.programs.body.pieces] == [False, True, False]
    assert service.runner is runner and service.failovers() == ()  # the runner stays, and so does its cache
    assert all(cache[name] is tensor for name, tensor in runner.cache.tensors().items())
    assert (service.health()["status"], service.device_name) == ("degraded", "sim")
    assert len([r for r in caplog.records if r.name == "piecework.failsafe"]) == 1


def test_a_piece_whose_device_is_lost_does_not_move_alone(make_service, clean):
    """Its inputs are gone, and so is all else."""
    service = make_service(
        device="sim,cpu", inject_fault="point=run,device=0,step=7,piece=2,kind=lost", **SMALL
    )
    tokens, _, texts = collect(service)
    assert (tokens, texts) == clean
    (event,) = service.failovers()
    assert (event.stage, event.kind, service.device_name) == ("run", "DeviceLostError", "cpu")
    assert service.graph_counters()["body"]["moved_pieces"] == 0


def test_the_switch_off_and_a_single_device_keep_the_first_error(make_service):
    with pytest.raises(DeviceError, match="planned fault at compile 0"):
        make_service(device="sim,cpu", failover="off", inject_fault="point=compile", **SMALL)
    with pytest.raises(DeviceError, match="planned fault at compile 0"):
        make_service(device="cpu", inject_fault="point=compile", **SMALL)
    with pytest.raises(ExhaustedError, match=r"sim at compile .*; cpu at compile "):
        make_service(device="sim,cpu", inject_fault="point=compile;point=compile,device=1", **SMALL)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device that isn't there is wanted")
@pytest.mark.slow
def test_the_switch_compile_moves_while_starting_only(make_service):
    fault = "point=run,device=1,step=1"
    service = make_service(device="cuda,cpu", failover="compile", inject_fault=fault, **SMALL)
    health = service.health()
    assert (health["status"], health["device"], health["events"][0]["stage"]) == (
        "degraded",
        "cpu",
        "compile",
    )
    assert "a machine with a GPU" in health["events"][0]["reason"]
    _, last, _ = collect(service, [[5, 6, 7]], GREEDY)
    assert last[(0, 0)].error == "the step failed: device cpu failed at step: planned fault at step 1"
    with pytest.raises(ConfigError, match="a machine with a GPU"):
        make_service(device="cuda,cpu", failover="off", **SMALL)


@pytest.mark.parametrize("device", ["", "sim,", "cpu,cpu", "sim,toaster"])
def test_a_list_that_is_none_is_refused_before_anything_is_loaded(make_service, device):
    with pytest.raises(ConfigError, match="device="):
        make_service(device=device)
