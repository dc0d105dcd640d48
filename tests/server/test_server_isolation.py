"""The process of a device dies or hangs in mid-stream, and the next device goes on with every stream."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import ServerProcess
from test_server_failover import FLAGS, all_streams, check

ISOLATED = ("--device", "sim,cpu", "--isolate")
TOKENS = 24
LONGER = 96  # of a tiny model, whose steps take no time: the kill has to come before the end


class Killer:
    """Kills the process that runs steps once `chunks` of all streams together have come."""

    def __init__(self, server: ServerProcess, chunks: int) -> None:
        (worker,) = server.get("/health").json()["workers"]
        assert (worker["kind"], worker["device"]) == ("process", "sim")
        self.pid = worker["pid"]
        self._left = chunks
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                os.kill(self.pid, signal.SIGKILL)


def check_killed(clean: list, server: ServerProcess, tokens: int) -> None:
    kill = Killer(server, chunks=40)
    check(clean, server, reason="WorkerLostError", tokens=tokens, on_chunk=kill)
    assert "killed by SIGKILL" in server.get("/health").json()["events"][0]["reason"]
    (worker,) = server.get("/health").json()["workers"]
    assert (worker["kind"], worker["device"]) == ("inline", "cpu")  # nobody would go on if it died
    assert not Path(f"/proc/{kill.pid}").exists()


@pytest.mark.timeout(900)
def test_eight_streams_survive_the_process_of_their_device(
    folder: str, server: ServerProcess, tmp_path: Path
) -> None:
    clean = all_streams(server, LONGER)
    with ServerProcess(folder, *FLAGS, *ISOLATED, log=tmp_path / "log") as failing:
        check_killed(clean, failing, LONGER)


@pytest.fixture(scope="module")
def of_the_default_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list]:
    log = tmp_path_factory.mktemp("clean") / "log"
    with ServerProcess("smollm2-135m", *FLAGS, "--device", "sim", log=log) as plain:
        yield all_streams(plain, TOKENS)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_default_model_survives_a_kill(of_the_default_model: list, tmp_path: Path) -> None:
    warm = ("--standby", "warm")
    with ServerProcess("smollm2-135m", *FLAGS, *ISOLATED, *warm, log=tmp_path / "log") as failing:
        check_killed(of_the_default_model, failing, TOKENS)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_default_model_survives_a_hang(of_the_default_model: list, tmp_path: Path) -> None:
    hang = ("--inject-fault", "point=run,device=0,step=7,kind=hang", "--step-timeout", "20")
    with ServerProcess("smollm2-135m", *FLAGS, *ISOLATED, *hang, log=tmp_path / "log") as failing:
        check(of_the_default_model, failing, reason="WorkerLostError", tokens=TOKENS)
        assert "silent beyond its deadline" in failing.get("/health").json()["events"][0]["reason"]
