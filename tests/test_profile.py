"""The profile: off costs nothing and records nothing, on records everything, from any thread."""

from __future__ import annotations

import json
import threading
import timeit

import pytest

from piecework.profile import Profile, now


def test_off_records_nothing() -> None:
    profile = Profile()
    with profile.time("a"):
        pass
    profile.add_time("a", 1.0)
    profile.add_bytes("b", 10)
    profile.count("c")
    assert not profile.enabled
    assert profile.snapshot() == {"timers": {}, "bytes": {}, "counters": {}}


def test_timer_measures_the_block_in_milliseconds() -> None:
    profile = Profile(enabled=True)
    before = now()
    with profile.time("wait"):
        threading.Event().wait(0.02)
    outside = (now() - before) * 1e3
    timer = profile.snapshot()["timers"]["wait"]
    assert timer["count"] == 1
    assert 19.0 <= timer["total_ms"] <= outside


def test_timer_totals_and_extremes() -> None:
    profile = Profile(enabled=True)
    for seconds in (0.003, 0.001, 0.002):
        profile.add_time("t", seconds)
    timer = profile.snapshot()["timers"]["t"]
    assert timer["count"] == 3
    assert timer["total_ms"] == pytest.approx(6.0)
    assert timer["mean_ms"] == pytest.approx(2.0)
    assert (timer["min_ms"], timer["max_ms"]) == (pytest.approx(1.0), pytest.approx(3.0))


def test_blocks_nest_and_errors_pass_through() -> None:
    profile = Profile(enabled=True)
    with pytest.raises(KeyError), profile.time("outer"), profile.time("outer"):
        raise KeyError("x")
    assert profile.snapshot()["timers"]["outer"]["count"] == 2


def test_a_block_begun_while_on_is_recorded() -> None:
    profile = Profile(enabled=True)
    with profile.time("a"):
        profile.disable()
    with profile.time("b"):
        profile.enable()
    assert list(profile.snapshot()["timers"]) == ["a"]


def test_bytes_and_counts_add_up() -> None:
    profile = Profile(enabled=True)
    profile.add_bytes("copy", 100)
    profile.add_bytes("copy", 28)
    profile.count("hit")
    profile.count("hit", 4)
    taken = profile.snapshot()
    assert taken["bytes"] == {"copy": {"count": 2, "total": 128}}
    assert taken["counters"] == {"hit": 5}


def test_snapshot_is_a_sorted_copy_for_json() -> None:
    profile = Profile(enabled=True)
    profile.count("b")
    profile.count("a")
    with profile.time("z"):
        pass
    taken = profile.snapshot()
    profile.count("a")
    assert list(taken["counters"]) == ["a", "b"]
    assert taken["counters"]["a"] == 1
    assert json.loads(json.dumps(taken)) == taken


def test_reset_forgets_and_stays_on() -> None:
    profile = Profile(enabled=True)
    profile.count("a")
    profile.reset()
    assert profile.snapshot()["counters"] == {}
    profile.count("a")
    assert profile.snapshot()["counters"] == {"a": 1}


def test_threads_lose_nothing() -> None:
    profile = Profile(enabled=True)

    def work() -> None:
        for _ in range(2000):
            with profile.time("t"):
                profile.count("c")
                profile.add_bytes("b", 3)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken = profile.snapshot()
    assert taken["timers"]["t"]["count"] == 8000
    assert taken["counters"]["c"] == 8000
    assert taken["bytes"]["b"] == {"count": 8000, "total": 24000}


def test_off_is_nearly_free() -> None:
    profile = Profile()

    def block() -> None:
        with profile.time("x"):
            pass

    best = min(timeit.repeat(block, number=10_000, repeat=5)) / 10_000
    assert best < 5e-6, f"a switched-off block took {best * 1e6:.2f} us"
