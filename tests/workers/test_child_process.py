"""Real children, real signals: how they start, answer, die and are ended."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from child_hosts import ECHO, Crashes, Deaf, Refuses, Sleeps, Stubborn, Trouble, make, started

from piecework.errors import ConfigError, DeviceError, WorkerError, WorkerLostError
from piecework.workers.process.process import ChildProcess
from piecework.workers.process.reap import close_all
from piecework.workers.process.spawn import Spawned

LIMIT = 60  # seconds; nothing here takes them on a machine with time to spare


def fds():
    return sorted(int(path.name) for path in Path("/proc/self/fd").iterdir())


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def eventually(check):
    end = time.time() + LIMIT
    while not check():
        assert time.time() < end, "it did not come true in time"
        time.sleep(0.02)


@pytest.fixture
def trouble():
    child = started(Trouble)
    yield child
    assert close_all([child], 5) == []


def test_calls_are_answered_in_order_and_large_ones_whole(trouble):
    futures = [trouble.call("echo", str(i).encode()) for i in range(2000)]
    assert [int(f.result(LIMIT)) for f in futures] == list(range(2000))
    large = os.urandom(3_000_000)
    both = [trouble.call("echo", large) for _ in range(3)]
    assert all(f.result(LIMIT) == large for f in both)


def test_whoever_waited_for_the_end_finds_everything_closed(monkeypatch):
    def slowly(spawned, close=Spawned.close):
        time.sleep(0.3)
        close(spawned)

    monkeypatch.setattr(Spawned, "close", slowly)
    before = len(fds())
    child = started(Trouble)
    child.signal(signal.SIGKILL)
    assert child.ended.wait(LIMIT) and len(fds()) <= before


def test_calls_from_a_callback_do_not_wait_for_the_child_to_read(trouble):
    """Requests and answers of many times what the sockets hold, asked for where answers are read."""
    found = []

    def ask(_):
        found.extend(trouble.call("parts", b"y" * 20) for _ in range(3))
        found.extend(trouble.call("echo", b"x" * 1000) for _ in range(2000))

    first = trouble.call("sleep", b"0.1")
    first.add_done_callback(ask)
    first.result(LIMIT)
    eventually(lambda: len(found) == 2003)
    assert {len(f.result(LIMIT)) for f in found} == {2_000_000, 1000}


def test_an_error_comes_back_as_what_it_was_and_the_child_goes_on(trouble):
    with pytest.raises(ConfigError, match="dtype='int1'") as error:
        trouble.call("raise").result(LIMIT)
    assert (error.value.field, error.value.allowed) == ("dtype", "a precision")
    assert "child_hosts.py" in error.value.__notes__[0]
    with pytest.raises(WorkerError, match="ValueError: a value"):
        trouble.call("value").result(LIMIT)
    assert trouble.call("echo", b"still here").result(LIMIT) == b"still here"


def test_what_a_child_writes_and_logs_is_passed_on(trouble, capsys, caplog):
    trouble.call("log", b"a record").result(LIMIT)
    assert ("piecework.tiny", logging.WARNING, "said a record") in caplog.record_tuples
    trouble.call("write", b"a line of its own\n").result(LIMIT)
    eventually(lambda: "a line of its own" in capsys.readouterr().err)


@pytest.mark.parametrize(
    ("host", "kind", "said"),
    [
        (Refuses, ConfigError, "dtype='int1'"),
        (Crashes, WorkerLostError, "ended with exit code 7; it wrote last: the last words"),
        ("no.such:thing", WorkerError, "ModuleNotFoundError"),
    ],
)
def test_a_start_that_fails_says_why_at_once(host, kind, said):
    child = make(host, start_timeout=None)
    with pytest.raises(kind, match=said):
        child.ready.result(LIMIT)
    assert child.ended.wait(LIMIT) and not is_alive(child.pid)


def test_a_start_that_takes_too_long_is_ended():
    child = make(Sleeps, start_timeout=0.3)
    with pytest.raises(DeviceError, match="silent"):
        child.ready.result(LIMIT)
    assert child.ended.wait(LIMIT) and child.lost.exit_code == -signal.SIGKILL


def test_a_killed_child_fails_its_calls_at_once_without_any_timeout(trouble):
    calls = [trouble.call("sleep", b"1000"), trouble.call("echo", b"behind it")]
    os.kill(trouble.pid, signal.SIGKILL)
    for call in calls:
        with pytest.raises(WorkerLostError, match="was killed by SIGKILL") as error:
            call.result(LIMIT)
        assert error.value.exit_code == -signal.SIGKILL
    assert trouble.ended.wait(LIMIT)
    with pytest.raises(WorkerLostError, match="SIGKILL"):
        trouble.call("echo")


def test_a_child_that_ends_by_itself_leaves_code_and_last_words(trouble):
    trouble.call("write", b"goodbye\n").result(LIMIT)
    with pytest.raises(WorkerLostError, match="exit code 3; it wrote last: goodbye"):
        trouble.call("exit", b"3").result(LIMIT)


def test_a_silent_child_is_killed_at_the_deadline_of_its_call():
    child = started(Deaf)
    assert child.call("echo", b"x", timeout=1000).result(LIMIT) == b"x"
    hung, behind = child.call("sleep", b"1000", timeout=0.2), child.call("echo", timeout=1000)
    for call in (hung, behind):
        with pytest.raises(WorkerLostError, match="silent beyond its deadline"):
            call.result(LIMIT)
    assert child.ended.wait(LIMIT) and not is_alive(child.pid)


def test_close_answers_what_was_asked_before_and_may_be_repeated():
    child = started(Trouble)
    calls = [child.call("sleep", b"0.1"), child.call("echo", b"last")]
    assert close_all([child], LIMIT) == [] == close_all([child], LIMIT)
    assert calls[1].result(0) == b"last" and child.lost.exit_code == 0
    with pytest.raises(WorkerLostError, match="closed"):
        child.call("echo")


def test_close_in_many_threads_during_a_run_is_one_close():
    children = [started(Trouble), started(Deaf)]
    calls = [child.call("sleep", b"1000") for child in children]
    threads = [threading.Thread(target=close_all, args=(children, 3.0)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    for child, call in zip(children, calls, strict=True):
        assert child.ended.wait(LIMIT) and not is_alive(child.pid)
        assert isinstance(call.exception(LIMIT), WorkerLostError)
    assert [child.lost.exit_code for child in children] == [-signal.SIGTERM, -signal.SIGKILL]


def test_hung_children_share_one_deadline(caplog):
    children = [started(Stubborn) for _ in range(6)]  # 10 seconds, one after the other
    begin = time.time()
    with caplog.at_level(logging.WARNING, "piecework.workers"):
        assert close_all(children, 2.0) == []
    assert time.time() - begin < 8
    assert "SIGTERM" in caplog.text and "SIGKILL" in caplog.text
    assert {child.lost.exit_code for child in children} == {-signal.SIGKILL}


def test_one_that_survives_is_listed_and_closed_later(monkeypatch):
    child = started(Stubborn)
    with monkeypatch.context() as patched:
        patched.setattr(ChildProcess, "signal", lambda self, number: None)
        assert close_all([child], 0.2) == [child]
    assert close_all([child], 3.0) == [] and not is_alive(child.pid)


def test_a_child_in_its_start_is_closed_without_waiting_for_it():
    child = make(Sleeps, start_timeout=None)
    assert close_all([child], LIMIT) == []
    assert isinstance(child.ready.exception(0), WorkerLostError)


PARENT = """
import sys, time
sys.path[:0] = {path!r}
from child_hosts import *
children = [started(Trouble), started(Stubborn), started(Nested)]
children[0].call("sleep", b"1000")
print(*(c.pid for c in children), children[2].ready.result().decode(), flush=True)
time.sleep(1000)
"""


def test_when_the_parent_is_killed_nothing_is_left():
    """A busy child, a deaf one, one that waits, and a child of a child; and what is in /dev/shm."""
    before = set(Path("/dev/shm").iterdir())
    code = PARENT.format(path=[str(Path(__file__).parent), *sys.path])
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 4 and all(map(is_alive, pids))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    eventually(lambda: not any(map(is_alive, pids)))
    eventually(lambda: set(Path("/dev/shm").iterdir()) <= before)  # others have some for a moment


def test_the_childs_thread_may_be_any_but_must_not_end_first():
    """The kernel kills a child with the thread that started it, so that is never one of ours."""
    found = []
    thread = threading.Thread(target=lambda: found.append(started(ECHO)))
    thread.start()
    thread.join(LIMIT)
    assert found[0].call("echo", b"x").result(LIMIT) == b"x"
    close_all(found, 5)


@pytest.mark.parametrize(
    "cycles", [5, pytest.param(100, marks=pytest.mark.slow), pytest.param(1000, marks=pytest.mark.soak)]
)
def test_many_starts_and_closes_leak_nothing(cycles):
    close_all([started(ECHO)], 5)
    before, threads = len(fds()), threading.active_count()
    for number in range(cycles):
        child = started(ECHO, number)
        if number % 3 == 0:
            os.kill(child.pid, signal.SIGKILL)
        assert close_all([child], LIMIT) == [] and not is_alive(child.pid)
    eventually(lambda: len(fds()) <= before)  # what other tests had may be closed meanwhile
    eventually(lambda: threading.active_count() <= threads)


def test_a_tiny_child_imports_no_torch():
    code = "import sys, piecework.workers.process.child, piecework.workers.process.echo; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy"} & {name.split(".")[0] for name in done.stdout.split()}
