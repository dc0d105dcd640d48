"""What running requests have in the KV cache goes with them to the next device, where it can be believed."""

from __future__ import annotations

import logging

import pytest
import torch
from carried_rig import GREEDY, LONG, PROMPTS, SMALL, collect, the_takeover

from piecework.engine.offline import run_requests
from piecework.kvcache import CarriedPages, PagedKVCache


def tokens_of(executed, device):
    """Numbers of tokens of the steps on a device."""
    return [sum(item.span.length for item in items) for name, items in executed if name == device]


@pytest.mark.parametrize("step", [1, 2, 5, 11])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_nothing_is_computed_again_after_an_error(make_service, clean, executed, step, prefix_caching):
    fault = f"point=run,device=0,step={step}"
    settings = {**SMALL, "prefix_caching": prefix_caching}
    service = make_service(device="sim,cpu", inject_fault=fault, **settings)
    assert collect(service) == clean
    carriage = the_takeover(service)
    assert carriage.copied_tokens > 0 and (carriage.computed_tokens, carriage.reason) == (0, None)
    assert carriage.bytes > 0 and service.device_name == "cpu"
    faulty = tokens_of(executed, "sim")
    rest = tokens_of(executed, "cpu")
    assert len(faulty) == step + 1 and len(faulty) - 1 + len(rest) == service.stats().steps_total - 1
    alone = sum(map(len, PROMPTS)) + len(PROMPTS[2]) + sum(len(t) - 1 for t in clean[0].values())
    known = service.stats().prefix_cached_tokens_total
    assert sum(faulty[:-1]) + sum(rest) == alone - known  # each token once, but for the step that failed
    service.close()
    assert service.stats().kv_pages_used == 0


@pytest.mark.slow
def test_in_bfloat16_the_tokens_are_those_of_the_first_device(make_service):
    settings = {**SMALL, "dtype": "bfloat16"}
    clean = collect(make_service(device="sim", **settings), [LONG], GREEDY)
    service = make_service(device="sim,cpu", inject_fault="point=run,step=4", **settings)
    assert collect(service, [LONG], GREEDY)[0][(0, 0)][:3] == clean[0][(0, 0)][:3]
    assert the_takeover(service).reason is None


def test_an_operator_moves_there_and_back_and_nothing_is_computed_again(make_service, clean, executed):
    service = make_service(device="sim,cpu", **SMALL)
    moves = {7: lambda: service.move_to("cpu"), 15: lambda: service.move_to("sim")}
    assert collect(service, then=moves) == clean
    first, second = service.pauses().carriages
    assert (first.device, second.device) == ("cpu", "sim")
    assert min(first.copied_tokens, second.copied_tokens) > 40
    assert (first.computed_tokens, second.computed_tokens) == (0, 0)
    assert all(count <= len(PROMPTS) + 1 for count in tokens_of(executed, "cpu"))


def test_what_others_may_use_of_the_tree_goes_along_with_the_requests_that_run(make_service):
    service = make_service(device="sim,cpu", inject_fault="point=run,device=0,step=6", **SMALL)
    collect(service, [LONG], GREEDY)
    assert the_takeover(service).copied_tokens >= 40
    before = service.stats().prefix_cached_tokens_total
    collect(service, [LONG], GREEDY)
    assert service.stats().prefix_cached_tokens_total - before == 32  # two full pages of the prompt


@pytest.mark.parametrize("kind", ["lost", "error"])
def test_an_audited_or_a_lost_device_s_cache_is_not_copied(make_service, clean, kind, executed):
    audit = {} if kind == "lost" else {"audit_device": "cpu", "audit_every": 4}
    fault = f"point=run,device=0,step=5,kind={kind}"
    service = make_service(device="sim,cpu", inject_fault=fault, **SMALL, **audit)
    assert collect(service) == clean
    carriage = the_takeover(service)
    assert carriage.copied_tokens == 0 and carriage.computed_tokens > 40
    reason = "the device is lost (DeviceLostError)" if kind == "lost" else "its numbers are audited"
    assert carriage.reason == reason
    (event,) = service.failovers()
    assert event.kind == ("DeviceLostError" if kind == "lost" else "DeviceError")


def test_the_switch_of_an_audit_copies_nothing(make_service, clean):
    settings = {**SMALL, "audit_device": "cpu", "audit_every": 1}
    service = make_service(device="sim", inject_fault="point=run,step=5,kind=wrong,where=cache", **settings)
    assert collect(service) == clean
    carriage = the_takeover(service)
    assert (carriage.copied_tokens, carriage.reason) == (0, "its numbers are audited")
    service.move_to("sim")  # nothing runs
    assert service.pauses().carriages[-1].reason is None


def test_a_cache_with_nan_is_not_copied(make_service, monkeypatch, clean):
    service = make_service(device="sim,cpu", inject_fault="point=run,device=0,step=5", **SMALL)
    read = CarriedPages.read.__func__

    def spoiled(kind, cache, pages):
        cache.values[1][next(iter(pages)), 0, 3, 5] = float("nan")
        return read(kind, cache, pages)

    monkeypatch.setattr(CarriedPages, "read", classmethod(spoiled))
    assert collect(service) == clean
    carriage = the_takeover(service)
    assert carriage.copied_tokens == 0 and carriage.computed_tokens > 40 and "are none" in carriage.reason


@pytest.mark.parametrize("what", ["read", "write"])
def test_where_copying_fails_all_is_computed_again(make_service, monkeypatch, clean, what, caplog):
    service = make_service(device="sim,cpu", inject_fault="point=run,device=0,step=5", **SMALL)

    def fails(*_):
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(CarriedPages, what, fails)
    assert collect(service) == clean
    carriage = the_takeover(service)
    assert carriage.copied_tokens == 0 and carriage.computed_tokens > 40
    assert carriage.reason.startswith("the cache can't be ") and "launch failure" in carriage.reason
    said = [r for r in caplog.records if r.name != "piecework.capture" and r.levelno >= logging.WARNING]
    assert [r.name for r in said] == ["piecework.failsafe"]
    service.close()
    assert service.stats().kv_pages_used == 0


def test_without_room_in_host_memory_all_is_computed_again(make_service, monkeypatch, clean):
    from piecework.engine import carry

    service = make_service(device="sim,cpu", inject_fault="point=run,device=0,step=5", **SMALL)
    monkeypatch.setattr(carry, "available_host_memory", lambda: 1000)
    assert collect(service) == clean
    assert "no room" in the_takeover(service).reason


@pytest.mark.parametrize("pages", [6, 5])
def test_a_target_with_less_room_takes_the_oldest_and_the_others_wait(
    make_service, monkeypatch, clean, pages
):
    from piecework.runner import load as loading

    made = loading.make_cache
    service = make_service(device="sim,cpu", inject_fault="point=run,device=0,step=8", **SMALL)

    def less(model, config, *rest):
        return made(model, config.__class__.from_flat({"num_pages": pages}), *rest)

    monkeypatch.setattr(loading, "make_cache", less)
    assert collect(service) == clean
    carriage = the_takeover(service)
    assert carriage.copied_tokens >= 40 and carriage.computed_tokens > 0
    assert carriage.reason == "the cache of cpu has less room"
    service.close()
    assert service.stats().kv_pages_used == 0


def test_a_cache_of_another_layout_gets_nothing(make_service, monkeypatch, clean):
    from piecework.runner import load as loading

    made = loading.make_cache
    service = make_service(device="sim,cpu", inject_fault="point=run,device=0,step=8", **SMALL)

    def other(model, config, *rest):
        return made(model, config.__class__.from_flat({"num_pages": 99, "page_size": 8}), *rest)

    monkeypatch.setattr(loading, "make_cache", other)
    assert collect(service) == clean
    carriage = the_takeover(service)
    assert carriage.copied_tokens == 0 and carriage.reason == "the cache of cpu has another layout"


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"kv_strategy": "static", "kv_capacities": "64"}, {"isolate": True}])
def test_slots_and_processes_compute_again(make_service, change):
    paged = SMALL if "isolate" in change else {"chunk_size": 16}
    settings = {**paged, **change}
    clean = collect(make_service(device="cpu", **SMALL), [LONG], GREEDY)
    service = make_service(device="sim,cpu", inject_fault="point=run,device=0,step=5", **settings)
    assert collect(service, [LONG], GREEDY) == clean
    carriage = the_takeover(service)
    assert carriage.copied_tokens == 0 and carriage.computed_tokens >= 40
    assert carriage.reason == "the cache is not in pages of this process"


def test_a_single_device_and_an_error_that_is_not_the_device_s_read_nothing(make_service, monkeypatch):
    def never(*_):
        raise AssertionError("nothing is to be read")

    monkeypatch.setattr(CarriedPages, "read", never)
    service = make_service(device="cpu", inject_fault="point=run,step=2", **SMALL)
    (_, last), *_ = reversed(list(run_requests(service, [LONG], GREEDY)))
    assert last.finish_reason == "error" and service.pauses().carriages == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_pages_arrive_as_they_were(dtype):
    from piecework.devices import make_device
    from piecework.kvcache import LayerShape

    torch.manual_seed(0)
    layers = [LayerShape(2, 8), LayerShape(1, 4)]
    old, new = (
        PagedKVCache(layers, pages, 4, dtype, make_device(name))
        for pages, name in ((300, "sim"), (200, "cpu"))
    )
    for tensor in old.tensors().values():
        tensor.copy_(torch.randint(-100, 100, tensor.shape))
    taken = [7, 3, 299, *range(20, 150)]
    pages = CarriedPages.read(old, taken)
    assert pages.fits(new) and pages.is_finite()
    assert pages.nbytes == len(taken) * old.nbytes // 300
    moves = {page: 199 - place for place, page in enumerate(taken) if page != 3}
    pages.write(new, moves)
    free = [page for page in range(200) if page not in moves.values()]
    for name, tensor in new.tensors().items():
        assert torch.equal(tensor[list(moves.values())], old.tensors()[name][list(moves)])
        assert not tensor[free].any()
    for other in (
        PagedKVCache(layers, 9, 8, dtype, make_device("cpu")),
        PagedKVCache(layers[:1], 9, 4, dtype, make_device("cpu")),
        PagedKVCache(layers, 9, 4, torch.float16, make_device("cpu")),
    ):
        assert not pages.fits(other)
    spoiled = next(t for t in reversed(old.tensors().values()) if t.is_floating_point())
    spoiled[20] = float("inf")
    assert not CarriedPages.read(old, taken).is_finite()
