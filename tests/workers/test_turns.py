"""Who waits for an answer reads it: the other thread sleeps on, and no end of the child is missed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from child_hosts import Trouble, started

from piecework.errors import ConfigError, WorkerLostError
from piecework.workers.process import turns
from piecework.workers.process.process import ChildProcess
from piecework.workers.process.reap import close_all

LIMIT = 60


@pytest.fixture(params=["turns", "attendant alone"])
def child(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChildProcess]:
    """A child; the second one is what systems without epoll have."""
    if request.param != "turns":
        monkeypatch.setattr(turns, "_EPOLL", ())
    made = started(Trouble)
    yield made
    assert close_all([made], 5) == []


def switches(thread: threading.Thread) -> int:
    """How often a thread went to sleep."""
    text = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    return int(text.split("\nvoluntary_ctxt_switches:")[1].split()[0])


def test_answers_are_read_by_who_waits_for_them() -> None:
    child = started(Trouble)
    child.ask("echo", b"first", timeout=100.0)
    time.sleep(0.2)
    before = switches(child._thread)
    for number in range(300):
        assert child.ask("echo", str(number).encode(), timeout=100.0) == str(number).encode()
    assert switches(child._thread) - before <= 3, "the attendant slept"
    assert child.call("echo", b"after", timeout=100.0).result(LIMIT) == b"after"
    end = time.time() + LIMIT  # it sleeps again a little after its answer is here
    while switches(child._thread) <= before:
        assert time.time() < end, "and is there for others"
        time.sleep(0.01)
    assert close_all([child], 5) == []


def test_large_ones_come_whole_and_errors_as_they_were(child: ChildProcess) -> None:
    large = os.urandom(3_000_000)
    assert child.ask("echo", large) == large
    assert len(child.ask("parts", b"y" * 20)) == 2_000_000
    with pytest.raises(ConfigError, match="int1"):
        child.ask("raise")
    assert child.ask("echo", b"on") == b"on"


def test_threads_that_ask_and_call_at_once_get_their_own_answers(child: ChildProcess) -> None:
    wrong: list[Any] = []

    def ask(name: int) -> None:
        for number in range(200):
            body = f"{name}.{number}".encode() * (1 + 400 * (number % 5 == 0))
            found = child.ask("echo", body) if (name + number) % 3 else child.call("echo", body).result(LIMIT)
            if found != body:
                wrong.append((name, number))

    threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert not any(thread.is_alive() for thread in threads) and wrong == []


@pytest.mark.parametrize("many", [1, 3])
def test_a_death_ends_whoever_reads(child: ChildProcess, many: int) -> None:
    errors: list[WorkerLostError] = []

    def ask() -> None:
        try:
            child.ask("sleep", b"1000")
        except WorkerLostError as error:
            errors.append(error)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(many)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    child.signal(signal.SIGKILL)
    for thread in threads:
        thread.join(LIMIT)
    assert len(errors) == many and all("SIGKILL" in str(error) for error in errors)
    assert child.ended.wait(LIMIT)
    with pytest.raises(WorkerLostError):
        child.ask("echo")


def test_a_deadline_ends_whoever_reads(child: ChildProcess) -> None:
    child.ask("echo", timeout=100.0)
    child.signal(signal.SIGSTOP)
    with pytest.raises(WorkerLostError, match="silent"):
        child.ask("echo", timeout=0.3)


def test_a_child_that_can_not_be_killed_does_not_keep_who_reads(
    child: ChildProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal that does nothing stands for a process that the kernel has no way to end."""
    monkeypatch.setattr(child, "signal", lambda number: None)
    begin = time.monotonic()
    with pytest.raises(WorkerLostError, match="silent"):
        child.ask("sleep", b"30", timeout=0.3)
    assert time.monotonic() - begin < 20
    monkeypatch.undo()
    child.signal(signal.SIGKILL)
    assert child.ended.wait(LIMIT)


def test_a_dead_child_whose_socket_lives_on_does_not_keep_who_reads(child: ChildProcess) -> None:
    pid = int(child.ask("leave"))
    heirs = [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    try:
        timer = threading.Timer(0.3, child.signal, (signal.SIGKILL,))
        timer.start()
        with pytest.raises(WorkerLostError, match="SIGKILL"):
            child.ask("sleep", b"1000")
        assert child.ended.wait(LIMIT)
    finally:
        for heir in heirs:
            os.kill(heir, signal.SIGKILL)


def test_close_lets_who_reads_have_the_answer(child: ChildProcess) -> None:
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(child.ask("sleep", b"0.5")), daemon=True)
    thread.start()
    end = time.time() + LIMIT
    while not child._pending._waiting:
        assert time.time() < end, "it never asked"
        time.sleep(0.01)
    time.sleep(0.2)  # and it waits
    assert close_all([child], 30) == []
    thread.join(LIMIT)
    assert found == [b"0.5"]
