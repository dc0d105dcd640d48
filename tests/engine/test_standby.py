"""A standby that is ready takes over at once, and the pause is measured and bounded either way."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from piecework.devices.cpu import CpuDevice
from piecework.engine.beside import run_beside
from piecework.engine.gaps import BOUNDS, Seconds
from piecework.engine.offline import run_requests
from piecework.errors import ConfigError, EngineDeadError
from piecework.runner import failover
from piecework.runner.standby import Standby
from piecework.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=8)
PROMPTS = [[7 + i % 90 for i in range(20)], [5, 6, 7]]
SMALL = {
    "chunk_size": 16,
    "compilation_config": {"compiler": "eager", "decode_capture_sizes": [2], "prefill_capture_sizes": [16]},
    "num_pages": 40,
}
FAULT = {"device": "sim,cpu", "inject_fault": "point=run,device=0,step=4", **SMALL}
LIMIT = 120  # seconds, for a machine that has other things to do


def tokens_of(service, prompts=PROMPTS):
    """Tokens of each prompt, and the last delta of each."""
    tokens, last = [[] for _ in prompts], [None for _ in prompts]
    for number, delta in run_requests(service, prompts, GREEDY):
        tokens[number] += delta.token_ids
        last[number] = delta
    return tokens, last


def wait_for(condition):
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def loads(monkeypatch):
    """Devices that the model was loaded on. `hold` keeps the loads of the second from going on."""
    made, load = [], failover.load
    made_hold = threading.Event()
    made_hold.set()

    def watched(config, profile, device, *arguments, **options):
        made.append(device.name)
        if device.name == "cpu":
            assert made_hold.wait(LIMIT)
        return load(config, profile, device, *arguments, **options)

    monkeypatch.setattr(failover, "load", watched)
    yield made, made_hold
    made_hold.set()


@pytest.fixture(scope="module")
def clean(folder):
    from piecework.config import EngineConfig
    from piecework.engine.service import Service

    plain = {"model": str(folder), "dtype": "float32", "threads": 1, **SMALL}
    service = Service(EngineConfig.from_flat({**plain, "compilation_config": {"compiler": "eager"}}))
    tokens, _ = tokens_of(service)
    service.close()
    return tokens


def test_a_warm_standby_takes_over_without_a_load(make_service, clean, loads, caplog):
    made, _ = loads
    with caplog.at_level(logging.INFO, "piecework.failsafe"):
        service = make_service(standby="warm", **FAULT)
        wait_for(lambda: service.standby()["status"] != "building")
    standby = service.health()["standby"]
    assert (standby["device"], standby["status"]) == ("cpu", "warm")
    assert (service.health()["status"], service.device_name) == ("ok", "sim")
    page = service.kv_bytes // service.runner.cache.num_pages
    assert (standby["weight_bytes"], standby["kv_bytes"]) == (service.weight_bytes, 40 * page)
    assert any("the standby cpu takes" in r.message and "of KV cache" in r.message for r in caplog.records)
    old = service.runner
    tokens, _ = tokens_of(service)
    assert tokens == clean and made == ["sim", "cpu"]  # nothing was loaded after the start
    (event,) = service.failovers()
    assert (event.source, event.target, service.device_name) == ("sim", "cpu", "cpu")
    health = service.health()
    assert health["status"] == "degraded" and "standby" not in health
    assert [e["status"] for e in health["events"] if e["stage"] == "standby"] == ["building", "warm"]
    wait_for(lambda: not hasattr(old, "programs"))  # let go once requests went on
    pauses = service.pauses()
    assert len(pauses.last_gaps) == 2 == sum(pauses.gaps.counts) and sum(pauses.detections.counts) == 1
    assert all(gap > pauses.last_detection >= 0 for gap in pauses.last_gaps)


def test_a_standby_that_is_not_ready_is_waited_for(make_service, clean, loads):
    made, go_on = loads
    go_on.clear()
    service = make_service(standby="warm", **FAULT)
    results = []
    thread = threading.Thread(target=lambda: results.append(tokens_of(service)))
    thread.start()
    wait_for(lambda: service.health()["status"] == "degraded")
    assert service.health()["standby"]["status"] == "building"
    sizes = []  # the device that failed has no cache any more, and the next one none yet
    looks = threading.Thread(target=lambda: sizes.append(service.kv_size().pages))
    looks.start()
    go_on.set()
    thread.join(LIMIT)
    looks.join(LIMIT)
    assert results[0][0] == clean and made == ["sim", "cpu"] and sizes == [40]


def test_a_standby_that_can_not_be_made_is_tried_again_when_it_is_needed(
    make_service, clean, monkeypatch, caplog
):
    load, asked = failover.load, []

    def once(config, profile, device, *arguments, **options):
        asked.append(device.name)
        if asked.count("cpu") == 1 and device.name == "cpu":
            raise RuntimeError("no room today")
        return load(config, profile, device, *arguments, **options)

    monkeypatch.setattr(failover, "load", once)
    service = make_service(standby="warm", **FAULT)
    wait_for(lambda: service.standby()["status"] == "failed")
    assert "the standby cpu can't be made now" in caplog.text and "no room today" in caplog.text
    assert tokens_of(service)[0] == clean and asked == ["sim", "cpu", "cpu"]
    assert service.device_name == "cpu"


def test_one_that_does_not_fit_is_refused_by_name(make_service, monkeypatch):
    closed = []
    monkeypatch.setattr(failover, "_close", closed.append)
    monkeypatch.setattr(CpuDevice, "free_memory", lambda self: 1000)
    with pytest.raises(ConfigError, match=r"the standby cpu does not fit: .* 0 bytes are free") as error:
        make_service(standby="warm", audit_device="sim", **FAULT)
    assert error.value.field == "standby"
    assert len(closed) == 2  # the reference is let go, too


class Model:
    """What a standby makes, as far as it looks."""

    def __init__(self, name):
        self.name, self.ready, self.closed = name, True, False
        self.runner = self.device = self

    def release_threads(self):
        pass

    def close(self):
        self.closed = True


@pytest.fixture
def standby():
    """A standby, the models that it made, and what holds their making up."""
    made, go_on = [], threading.Event()
    go_on.set()

    def load(name):
        made.append(Model(name))
        assert go_on.wait(LIMIT)
        return made[-1]

    one = Standby(load, lambda name: None)
    yield one, made, go_on
    go_on.set()
    one.close()
    assert all(model.closed for model in made)


def test_a_standby_of_a_device_that_is_not_the_next_any_more_makes_room(standby):
    one, made, _ = standby
    one.start(["b", "c"])
    assert one.take("b") is made[0]
    one.start(["c"])
    wait_for(lambda: one.is_warm("c"))
    one.start(["b", "c"])  # somebody went back to the first device
    wait_for(lambda: one.is_warm("b"))
    assert [(model.name, model.closed) for model in made] == [("b", False), ("c", True), ("b", False)]
    one.start(["b", "c"])
    assert len(made) == 3
    one.start([])  # nothing takes over from what serves now
    assert one.as_dict() is None and made.pop().closed and not made[0].closed
    made[0].close()


def test_a_standby_that_nobody_waits_for_any_more_is_let_go_when_it_is_made(standby):
    one, made, go_on = standby
    go_on.clear()
    one.start(["b"])
    one.start([])
    go_on.set()
    wait_for(lambda: made and made[0].closed)
    assert one.take("b") is None and one.as_dict() is None


def test_a_standby_whose_process_died_does_not_take_over(standby):
    one, made, _ = standby
    one.start(["b"])
    wait_for(lambda: one.is_warm("b"))
    made[0].ready = False
    assert one.as_dict()["status"] == "failed" and not one.is_warm("b")
    assert one.take("b") is None and made[0].closed and one.as_dict() is None


def test_after_a_failed_audit_no_standby_stays(make_service, clean, loads):
    fault = "point=run,device=0,step=4,kind=wrong"
    service = make_service(
        standby="warm", audit_device="sim", audit_every=1, **{**FAULT, "inject_fault": fault}
    )
    wait_for(lambda: service.standby()["status"] == "warm")
    assert tokens_of(service)[0] == clean
    wait_for(lambda: service.standby() is None)
    service.move_to("sim")
    wait_for(lambda: (service.standby() or {}).get("status") == "warm")


def test_once_it_closes_nothing_is_loaded_any_more(make_service, loads):
    service = make_service(**FAULT)
    service._runners.stop()
    with pytest.raises(EngineDeadError, match="shutting down"):
        service.move_to("cpu")
    assert loads[0] == ["sim"]


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"device": "cpu", "standby": "warm"}, "standby"),
        ({"device": "sim,cpu", "standby": "warm", "failover": "compile"}, "standby"),
        ({"device": "cpu", "max_failover_seconds": 3.0}, "max_failover_seconds"),
        ({"device": "cpu", "isolate": True}, "isolate"),
        ({"device": "sim,cpu", "isolate": True, "workers": "inline"}, "isolate"),
    ],
)
def test_what_no_failover_can_do_is_refused(make_service, settings, field):
    with pytest.raises(ConfigError) as error:
        make_service(**settings)
    assert error.value.field == field


def test_requests_do_not_wait_for_longer_than_they_may(make_service, clean, loads):
    _, go_on = loads
    go_on.clear()
    service = make_service(max_failover_seconds=0.2, **FAULT)
    tokens, last = tokens_of(service)  # it returns while the next device still loads
    assert service.health()["status"] == "degraded" and service.device_name == "sim"
    for found, delta, expected in zip(tokens, last, clean, strict=True):
        assert delta.finish_reason == "error" and "max_failover_seconds=0.2" in delta.error
        assert 0 < len(found) < 8 and found == expected[: len(found)]
    go_on.set()
    assert tokens_of(service)[0] == clean and service.device_name == "cpu"
    assert sum(service.pauses().gaps.counts) == 0  # those that ended had no token after


def test_work_beside_deadlines_gives_its_result_and_its_errors():
    assert run_beside(threading.current_thread, lambda: None, lambda: None) is threading.current_thread()
    left, passed = [0.0, 0.0], threading.Event()

    def overdue():
        left.pop()
        passed.set()

    assert run_beside(lambda: passed.wait(LIMIT), lambda: left[-1] if left else None, overdue) is True
    with pytest.raises(TimeoutError, match="the work's"):
        run_beside(lambda: (_ for _ in ()).throw(TimeoutError("the work's")), lambda: 60.0, lambda: None)


def test_a_histogram_counts_each_time_once():
    found = Seconds().plus(0.01).plus(0.011).plus(9999.0)
    assert found.counts[:2] == (1, 1) and found.counts[-1] == 1 and sum(found.counts) == 3
    assert found.sum == pytest.approx(9999.021) and len(found.counts) == len(BOUNDS) + 1


def test_a_device_that_cannot_be_let_go_does_not_end_the_engine(make_service, monkeypatch, caplog):
    service = make_service(**FAULT, standby="warm")
    wait_for(lambda: service.standby()["status"] == "warm")

    def broken(loaded):
        raise RuntimeError("the device hangs")

    with monkeypatch.context() as patch:
        patch.setattr(failover, "_close", broken)
        first, _ = tokens_of(service)
        wait_for(lambda: "could not be put away" in caplog.text)
        second, last = tokens_of(service)
    assert second == first and {delta.finish_reason for delta in last} == {"length"}
