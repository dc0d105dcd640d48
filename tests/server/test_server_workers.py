"""A server whose model runs in a process of its own: what clients and watchers see when that dies."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

FLAGS = ("--served-model-name", "tiny", "--dtype", "float32", "--threads", "1", "--num-pages", "1200")
LONG: dict[str, Any] = {"prompt": "hi", "max_tokens": 4000, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def server(folder: str, tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(folder, *FLAGS, "--workers", "process", log=tmp_path / "log") as running:
        running.http.timeout = 300
        yield running


def eventually(check: Any, seconds: float = 300) -> None:
    end = time.time() + seconds
    while not check():
        assert time.time() < end, "it did not come true in time"
        time.sleep(0.1)


def worker(server: ServerProcess) -> dict[str, Any]:
    (found,) = server.get("/health").json()["workers"]
    return dict(found)


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_a_worker_killed_in_mid_stream(server: ServerProcess) -> None:
    short = {**LONG, "max_tokens": 8}
    before, text = worker(server), server.post("/v1/completions", short).json()["choices"][0]["text"]
    assert (before["kind"], before["generation"], before["status"]) == ("process", 0, "ready")
    with server.http.stream("POST", server.url + "/v1/completions", json={**LONG, "stream": True}) as stream:
        lines = (line for line in stream.iter_lines() if line)
        for _ in range(5):
            next(lines)
        killed = time.time()
        os.kill(before["pid"], signal.SIGKILL)
        rest = list(lines)
        print("from SIGKILL to the end of the stream:", time.time() - killed, "s")
    assert rest[-1] == "data: [DONE]"
    error = json.loads(rest[-2].removeprefix("data: "))["error"]
    assert error["code"] == "engine_error" and "was killed by SIGKILL" in error["message"]
    # What comes meanwhile waits for the restart.
    assert server.post("/v1/completions", short).json()["choices"][0]["text"] == text
    after = worker(server)
    assert (after["generation"], after["restarts"], after["status"]) == (1, 1, "ready")
    assert after["pid"] != before["pid"] and gone(before["pid"])
    health = server.get("/health")
    assert health.status_code == 200 and "SIGKILL" in health.json()["events"][0]["reason"]
    assert server.metric('piecework_worker_restarts_total{worker="cpu"}') == 1
    assert server.metric('piecework_worker_up{worker="cpu"}') == 1
    assert server.metric('piecework_worker_generation{worker="cpu"}') == 1
    os.kill(after["pid"], signal.SIGKILL)
    eventually(lambda: server.get("/health").status_code == 503)
    assert server.get("/health").json()["status"] == "restarting"
    server.signal(signal.SIGTERM)  # in the middle of a restart
    assert server.wait(60) == 0
    assert "Traceback" not in server.log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_when_the_server_ends_its_worker_ends(server: ServerProcess, number: signal.Signals) -> None:
    pid = worker(server)["pid"]
    server.signal(number)
    assert server.wait(60) == (0 if number == signal.SIGTERM else -number)
    eventually(lambda: gone(pid), 30)
