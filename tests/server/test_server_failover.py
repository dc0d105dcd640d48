"""Streams over HTTP go on while their device fails, and end with one clear error where none is left."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from server_process import ServerProcess

SMALL = ("--decode-capture-sizes", "8", "--prefill-capture-sizes", "16", "--chunk-size", "64")
FLAGS = ("--dtype", "float32", "--threads", "1", "--num-pages", "200", *SMALL)
TOKENS = 12
CLIENTS = 8


def stream(
    server: ServerProcess, number: int, tokens: int = TOKENS, on_chunk: Callable[[], None] = lambda: None
) -> tuple[list[str], str | None, int]:
    """One client: the texts of its chunks, how it ended, and the number of its tokens."""
    body = {
        "prompt": f"Client {number} says:" + " and on" * number,
        "max_tokens": tokens,
        "temperature": 0.0 if number % 2 else 0.8,
        "seed": number,
        # Of the whole vocabulary's tail, rounding would choose another token now and then.
        "top_k": 20,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    texts: list[str] = []
    finish, used = None, 0
    with server.http.stream("POST", server.url + "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                return texts, chunk["error"]["message"], used
            on_chunk()
            for choice in chunk["choices"]:
                texts.append(choice["text"])
                finish = choice["finish_reason"] or finish
            used = (chunk.get("usage") or {}).get("completion_tokens", used)
    return texts, finish, used


def all_streams(
    server: ServerProcess, tokens: int = TOKENS, on_chunk: Callable[[], None] = lambda: None
) -> list[tuple[list[str], str | None, int]]:
    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(lambda number: stream(server, number, tokens, on_chunk), range(CLIENTS)))


def check(
    clean: list,
    server: ServerProcess,
    *,
    reason: str = "DeviceError",
    tokens: int = TOKENS,
    on_chunk: Callable[[], None] = lambda: None,
    paused: bool = True,
) -> None:
    """`paused`: whether a client had tokens before the failure, and so waited for the next one."""
    got = all_streams(server, tokens, on_chunk)
    assert ["".join(texts) for texts, _, _ in got] == ["".join(texts) for texts, _, _ in clean]
    assert {(finish, used) for _, finish, used in got} == {("length", tokens)}
    health = server.get("/health")
    assert health.status_code == 200
    assert (health.json()["status"], health.json()["device"]) == ("degraded", "cpu")
    labels = f'from="sim",reason="{reason}",stage="run",to="cpu"'
    assert server.metric(f"piecework_failover_total{{{labels}}}") == 1
    assert int(paused) <= server.metric("piecework_failover_gap_seconds_count") <= CLIENTS
    assert server.metric("piecework_failover_detection_seconds_count") == 1
    copied, computed = (
        server.metric(f'piecework_failover_kv_tokens_total{{way="{way}"}}') for way in ("copied", "computed")
    )
    assert (copied > 0, computed > 0) == (paused and reason == "DeviceError", reason == "WorkerLostError")
    assert server.metric('piecework_active_device{device="cpu"}') == 1
    assert server.metric('piecework_active_device{device="sim"}') == 0
    assert server.log.count("took over") == 1 and "Traceback" not in server.log


def test_eight_streams_survive_their_device(folder: str, server: ServerProcess, tmp_path: Path) -> None:
    clean = all_streams(server)
    fault = ("--device", "sim,cpu", "--inject-fault", "point=run,device=0,step=7")
    with ServerProcess(folder, *FLAGS, *fault, log=tmp_path / "log") as failing:
        check(clean, failing)


@pytest.mark.slow
def test_without_a_device_left_running_requests_end_and_new_ones_get_503(folder: str, tmp_path: Path) -> None:
    fault = "point=run,device=0,step=7;point=compile,device=1"
    flags = ("--device", "sim,cpu", "--inject-fault", fault)
    with ServerProcess(folder, *FLAGS, *flags, log=tmp_path / "log") as failing:
        for _, error, _ in all_streams(failing):
            assert error is not None and "all devices failed: sim at run (DeviceError: planned" in error
            assert "cpu at compile (DeviceError: planned fault at compile 0)" in error
        refused = failing.post("/v1/completions", {"prompt": "hi", "max_tokens": 2})
        assert refused.status_code == 503 and "all devices failed" in refused.json()["error"]["message"]
        health = failing.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "dead")


@pytest.fixture(scope="module")
def default_clean(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[list[str], str | None, int]]:
    log = tmp_path_factory.mktemp("clean") / "log"
    with ServerProcess("smollm2-135m", *FLAGS, "--device", "sim", log=log) as plain:
        return all_streams(plain)


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 1, 7, TOKENS])
def test_the_default_model_survives_its_device(step: int, default_clean: list, tmp_path: Path) -> None:
    fault = ("--device", "sim,cpu", "--inject-fault", f"point=run,device=0,step={step}")
    with ServerProcess("smollm2-135m", *FLAGS, *fault, log=tmp_path / "log") as failing:
        check(default_clean, failing, paused=step > 0)
