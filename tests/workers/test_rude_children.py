"""Children that write without end, raise what can't be told, or have a parent that can't listen."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from child_hosts import make, started

from piecework.errors import ConfigError, WorkerError, WorkerLostError
from piecework.workers.process import process as parent
from piecework.workers.process.echo import Echo
from piecework.workers.process.faults import fault_of, raised
from piecework.workers.process.messages import Fault, decode, encode
from piecework.workers.process.output import Output
from piecework.workers.process.process import ChildProcess
from piecework.workers.process.reap import close_all
from piecework.workers.process.wire import Channel

LIMIT = 60


class Speechless(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


ERRORS = {
    "speechless": Speechless(),
    "half a character": ValueError("a file named \udcff"),
    "a large number": ConfigError("size", 2**70, "less"),
    "half a value": ConfigError("name", "\udcff", "a name"),
    "exit": SystemExit(3),
}


class Rude(Echo):
    """Does what its method says, in a child."""

    def handle(self, method: str, body: bytes, fds: tuple[int, ...]) -> bytes:
        match method:
            case "raise":
                raise ERRORS[body.decode()]
            case "log":
                logging.getLogger("piecework.tiny").warning("a file named \udcff")
                logging.getLogger("piecework.tiny").warning("%d", "no number")
            case "write":
                os.write(2, b"words\n" * 1000)
            case "endless":
                while True:
                    os.write(2, b"y" * 2**16)
        return body


@pytest.fixture
def rude() -> Iterator[ChildProcess]:
    child = started("test_rude_children:Rude")
    yield child
    assert close_all([child], 5) == []


@pytest.mark.parametrize("name", ERRORS)
def test_whatever_is_raised_comes_back_and_the_child_goes_on(rude: ChildProcess, name: str) -> None:
    error = ERRORS[name]
    kind = ConfigError if isinstance(error, ConfigError) else WorkerError
    with pytest.raises(kind) as found:
        rude.call("raise", name.encode()).result(LIMIT)
    if kind is WorkerError:
        assert type(error).__name__ in str(found.value)
    assert rude.call("echo", b"on").result(LIMIT) == b"on"


def test_values_travel_as_they_are_where_they_can() -> None:
    for value in (None, True, 1.5, -(2**63), 2**64 - 1, "text"):
        fault = decode(Fault, encode(fault_of(ConfigError("field", value, "another"))))
        found = raised(fault, "w")
        assert isinstance(found, ConfigError) and found.value == value and type(found.value) is type(value)


def test_a_record_that_cannot_be_told_is_not_its_authors_failure(
    rude: ChildProcess, caplog: pytest.LogCaptureFixture
) -> None:
    assert rude.call("log", b"done").result(LIMIT) == b"done"
    assert "a file named \\udcff" in caplog.text


class Unread:
    """A standard error that nobody reads any more, or that takes its time."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def write(self, text: str) -> int:
        time.sleep(self.seconds)
        if not self.seconds:
            raise BrokenPipeError
        return len(text)

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("stream", [None, Unread()])
def test_words_that_go_nowhere_do_not_end_who_attends(
    rude: ChildProcess, stream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    assert rude.call("write", b"said").result(LIMIT) == b"said"
    assert rude.call("echo", b"on").result(LIMIT) == b"on"


def test_a_child_that_never_stops_writing_has_its_deadline(
    rude: ChildProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", Unread(0.01))  # the pipe is full again each time
    with pytest.raises(WorkerLostError, match="silent beyond its deadline"):
        rude.call("endless", timeout=0.3).result(LIMIT)
    assert rude.ended.wait(LIMIT)


def test_one_look_at_what_a_child_writes_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where an heir of the child goes on writing."""
    monkeypatch.setattr(sys, "stderr", Unread(0.001))
    heir = subprocess.Popen(["yes"], stdout=subprocess.PIPE)
    assert heir.stdout is not None
    output = Output(os.dup(heir.stdout.fileno()))
    try:
        assert output.read()
        output.read_rest()
    finally:
        heir.kill()
        heir.wait()
        heir.stdout.close()
        output.close()


def test_a_parent_that_cannot_attend_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_files() -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(parent.selectors, "DefaultSelector", no_files)
    child = make("test_rude_children:Rude")
    with pytest.raises(WorkerLostError, match=r"can't be attended to .*Too many open files"):
        child.ready.result(LIMIT)
    assert child.ended.wait(LIMIT) and close_all([child], 5) == []


def test_a_call_that_cannot_be_sent_is_not_waited_for(
    rude: ChildProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its deadline would come, and the child would be killed for a silence that is not its own."""

    def full(*_: object) -> bool:
        raise OSError(109, "Too many references: cannot splice")

    with monkeypatch.context() as patch:
        patch.setattr(Channel, "post", full)
        with pytest.raises(OSError, match="references"):
            rude.call("echo", timeout=0.2)
    time.sleep(0.5)
    assert rude.call("echo", b"on").result(LIMIT) == b"on" and rude.lost is None


STOPPED = """
import os, signal, sys, time
from child_hosts import Trouble, started
child = started(Trouble)
future = child.call("sleep", b"1.5", timeout=2.0)
print(child.pid, flush=True)
print(future.exception() or "answered", flush=True)
"""


def test_a_parent_that_was_stopped_does_not_blame_its_child() -> None:
    """Both are stopped beyond the deadline, as by a frozen container; the child has its time again."""
    folder = str(Path(__file__).parent)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, *filter(None, sys.path)])}
    process = subprocess.Popen([sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    time.sleep(0.3)
    for one in (pid, process.pid):
        os.kill(one, signal.SIGSTOP)
    time.sleep(3.5)
    os.kill(process.pid, signal.SIGCONT)
    time.sleep(0.5)
    os.kill(pid, signal.SIGCONT)
    said = process.stdout.readline().strip()
    process.stdout.close()
    process.wait(LIMIT)
    assert said == "answered"
