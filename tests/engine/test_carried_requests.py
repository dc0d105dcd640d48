"""Whatever runs when a device fails goes on: batches, those that gave up pages, those that are cancelled."""

from __future__ import annotations

import pytest
from carried_rig import GREEDY, LONG, SEEDED, SMALL, collect, the_takeover, undisturbed

BATCH = [[3 + number, *range(9, 9 + number)] for number in range(8)]


@pytest.fixture(scope="module")
def of_size(folder):
    """Tokens of a batch without a failure, by its size."""
    sizes = (1, 8)
    return dict(zip(sizes, undisturbed(folder, *[(BATCH[:size], GREEDY) for size in sizes]), strict=True))


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("step", [0, 1, 5, 9], ids=["prefill", "first", "middle", "last"])
@pytest.mark.parametrize("kind", ["error", "lost"])
def test_whichever_step_fails_a_batch_of_any_size_streams_on(make_service, of_size, size, step, kind):
    fault = f"point=run,device=0,step={step},kind={kind}"
    service = make_service(device="sim,cpu", inject_fault=fault, **SMALL)
    assert collect(service, BATCH[:size], GREEDY) == of_size[size]
    carriage = the_takeover(service)
    known = (carriage.copied_tokens, carriage.computed_tokens)
    assert bool(known[kind == "error"]) is False and bool(known[kind != "error"]) is (step > 0)


def test_two_devices_that_fail_one_after_another_and_in_one_step_lose_nothing(make_service, clean):
    fault = "point=run,device=0,step=4;point=run,device=0,step=4,kind=lost;point=run,device=1,step=0"
    service = make_service(device="sim,sim:host,cpu", inject_fault=fault, **SMALL)
    assert collect(service) == clean
    first, second = service.pauses().carriages
    assert (first.device, second.device) == ("sim", "cpu")
    assert first.copied_tokens == second.copied_tokens > 40  # the second failed before it computed anything


def test_requests_that_gave_up_their_pages_wait_and_the_others_keep_theirs(make_service):
    settings = {**SMALL, "num_pages": 8, "prefix_caching": False}
    params = GREEDY.with_changes(max_tokens=40)
    clean = collect(make_service(device="cpu", **settings), BATCH, params)
    service = make_service(device="sim,cpu", inject_fault="point=run,device=0,step=25", **settings)
    assert collect(service, BATCH, params) == clean
    carriage = the_takeover(service)
    assert service.stats().preemptions_total > 0 and carriage.copied_tokens > 0
    assert carriage.computed_tokens == 0


def test_what_is_cancelled_while_the_next_device_loads_leaves_no_page_behind(make_service, monkeypatch):
    from piecework.runner import failover

    load = failover.load
    service = make_service(device="sim,cpu", inject_fault="point=run,device=0,step=5", **SMALL)
    ended = {}

    def cancelling(*arguments, **options):
        service.abort("one")
        return load(*arguments, **options)

    monkeypatch.setattr(failover, "load", cancelling)

    def listener(name):
        return lambda delta: ended.update({name: delta.finish_reason}) if delta.finish_reason else None

    with service.at_once():
        service.submit(LONG, SEEDED, request_id="one", listener=listener("one"))
        service.submit(LONG, GREEDY, request_id="two", listener=listener("two"))
    assert service.drain(120)
    assert ended == {"one": "abort", "two": "length"} and the_takeover(service).copied_tokens > 40
    service.close()
    assert service.stats().kv_pages_used == 0
