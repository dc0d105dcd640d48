"""The soak: what it kills is drawn from a seed, it sees what is wrong, and 20 kills leave nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tools.soak.__main__ import main
from tools.soak.clients import Clients
from tools.soak.processes import descendants, open_files, started_at, wait_until
from tools.soak.schedule import make_schedule

ANSWERS = [
    b'data: {"choices": [{"finish_reason": null}]}\n\n',
    b'data: {"error": {"message": "the step failed", "code": "engine_error"}}\n\n',
    b'data: {"error": {"message": "", "code": "engine_error"}}\n\n',
    b'data: {"choices": [{"finish_reason": "length"}], "usage": {"completion_tokens": 24}}\n\n',
]


def test_a_schedule_is_drawn_from_its_seed() -> None:
    schedule = make_schedule(200, 3)
    assert schedule == make_schedule(200, 3) and schedule != make_schedule(200, 4)
    assert sum(kill.server for kill in schedule) == 10 and len(schedule) == 200
    assert max(kill.delay for kill in schedule) <= 0.5


def test_processes_and_files_are_found() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in descendants(os.getpid())
        first = started_at(child.pid)
        assert first is not None and started_at(child.pid) == first
        before = open_files(os.getpid())
        segment = os.memfd_create("leak")
        assert any("memfd:leak" in one for one in open_files(os.getpid()) if one not in before)
        os.close(segment)
        child.kill()
        assert wait_until(lambda: started_at(child.pid) is None, 60)  # a zombie has ended


@contextmanager
def answering(answers: list[bytes | None]) -> Iterator[str]:
    """A server that gives each request the next of the answers, the last one again; None breaks off."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            answer = answers.pop(0) if len(answers) > 1 else answers[0]
            if answer is not None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_clients_see_what_is_wrong() -> None:
    with answering([*ANSWERS[:3], None, ANSWERS[3]]) as address:
        clients = Clients(1, address)
        assert wait_until(lambda: clients.ends["result"] > 2, 60)
        clients.server_killed(address)
        assert clients.stop()
    assert clients.ends["error"] == 2 and clients.ends["cut"] >= 1
    assert len(clients.wrong) == 3
    assert "ended with 0 tokens and finish_reason None" in clients.wrong[0]
    assert "an error that says nothing" in clients.wrong[1]
    assert "the connection broke" in clients.wrong[2]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_twenty_kills_leave_nothing_behind(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--kills", "20", "--minutes", "20", "--seed", "7"])
    print(report := capsys.readouterr().out)
    assert code == 0, report
