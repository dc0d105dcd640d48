"""Keys, full queues, clients that leave, and how a server ends."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import ServerProcess

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
LONG: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4000}
ENDLESS = {"ignore_eos": True}
KEY = "schlüssel-1"
FLAGS = ("--served-model-name", "tiny", "--dtype", "float32", "--threads", "1", "--num-pages", "1200")


def eventually(check: Callable[[], bool], seconds: float = 60) -> None:
    """Wait until `check` holds; the engine's numbers are as of its last step."""
    end = time.time() + seconds
    while not check():
        assert time.time() < end, "it did not come true in time"
        time.sleep(0.05)


def unfinished(server: ServerProcess, body: bytes = b"", length: int = 100) -> socket.socket:
    """A connection that has sent a request with `body`, of `length` bytes, and will read no answer."""
    connection = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=10)
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode() + body)
    return connection


def idle(server: ServerProcess) -> bool:
    return server.metric("piecework_requests_running") == 0 and server.metric("piecework_kv_pages_used") == 0


def test_a_cancelled_stream_frees_its_pages(server: ServerProcess) -> None:
    eventually(lambda: idle(server))
    aborted = server.metric('piecework_requests_total{finish_reason="abort"}')
    stream = server.openai.chat.completions.create(**LONG, stream=True, n=2, extra_body=ENDLESS)
    for _ in range(20):
        next(stream)
    assert server.metric("piecework_kv_pages_used") > 0 and server.metric("piecework_requests_running") == 2
    stream.close()
    eventually(lambda: idle(server))
    assert server.metric('piecework_requests_total{finish_reason="abort"}') == aborted + 2


def test_a_client_that_stops_waiting_frees_its_pages(server: ServerProcess) -> None:
    eventually(lambda: idle(server))
    aborted = server.metric('piecework_requests_total{finish_reason="abort"}')
    body = json.dumps({**LONG, **ENDLESS}).encode()
    with unfinished(server, body, len(body)):
        eventually(lambda: server.metric("piecework_requests_running") == 1)
    eventually(lambda: idle(server))
    assert server.metric('piecework_requests_total{finish_reason="abort"}') == aborted + 1


def test_a_client_that_leaves_in_its_body_is_forgotten(server: ServerProcess) -> None:
    for body in (b"", b'{"mess'):
        unfinished(server, body).close()
    assert server.get("/health").status_code == 200


@pytest.fixture(scope="module")
def guarded(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with a key and room for one running and one waiting request."""
    log = tmp_path_factory.mktemp("guarded") / "log"
    small = ("--max-num-seqs", "1", "--max-queue", "1", "--drain-timeout", "0.5")
    with ServerProcess(folder, *FLAGS, *small, log=log, env={"PIECEWORK_API_KEY": KEY}) as running:
        yield running


def test_the_api_key(guarded: ServerProcess) -> None:
    good = {"Authorization": f"Bearer {KEY}".encode()}
    assert guarded.get("/v1/models", headers=good).status_code == 200
    assert guarded.get("/v1/models", headers={"Authorization": f"bearer  {KEY}".encode()}).status_code == 200
    for value in ("", "Bearer", "Bearer wrong", KEY, f"Basic {KEY}", f"Bearer {KEY}x", "Bearer \xff"):
        for path in ("/v1/models", "/nothing"):
            answer = guarded.get(path, headers={"Authorization": value.encode()})
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer" and KEY not in answer.text
    for path in ("/health", "/version", "/metrics"):
        assert guarded.get(path).status_code == 200


def test_a_full_queue_is_429_and_too_many_samples_400(guarded: ServerProcess) -> None:
    headers = {"Authorization": f"Bearer {KEY}".encode()}
    long = {"messages": MESSAGES, "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=guarded.url, headers=headers, timeout=60) as client:
        with client.stream("POST", "/v1/chat/completions", json=long) as running:
            assert running.status_code == 200
            eventually(lambda: guarded.metric("piecework_requests_running") == 1)
            with client.stream("POST", "/v1/chat/completions", json=long) as waiting:
                assert waiting.status_code == 200
                eventually(lambda: guarded.metric("piecework_requests_waiting") == 1)
                refused = client.post("/v1/chat/completions", json=long)
                assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
                assert refused.json()["error"]["code"] == "queue_full"
                assert "max_queue" in refused.json()["error"]["message"]
        eventually(lambda: idle(guarded))
        never = client.post("/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 1})
        assert never.status_code == 400 and never.json()["error"]["param"] == "prompt"
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_what_outlives_the_drain_is_cut_off_with_an_error(guarded: ServerProcess) -> None:
    """The last test of this server: it ends."""
    headers = {"Authorization": f"Bearer {KEY}".encode()}
    long = {"messages": MESSAGES, "max_tokens": 4000, "ignore_eos": True}
    with (
        httpx.Client(base_url=guarded.url, headers=headers, timeout=60) as client,
        ThreadPoolExecutor(1) as pool,
        client.stream("POST", "/v1/chat/completions", json={**long, "stream": True}) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        waiting = pool.submit(guarded.post, "/v1/chat/completions", long, headers=headers)
        eventually(lambda: guarded.metric("piecework_requests_waiting") == 1)
        guarded.signal(signal.SIGTERM)
        rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "shutdown"
        assert waiting.result(60).status_code == 503
        assert waiting.result().json()["error"]["code"] == "shutdown"
    assert guarded.wait() == 0


def start(folder: str, log: Path, *flags: str) -> ServerProcess:
    return ServerProcess(folder, *FLAGS, *flags, log=log)


def test_sigterm_in_mid_stream_drains(folder: str, tmp_path: Path) -> None:
    with start(folder, tmp_path / "log") as server, ThreadPoolExecutor(1) as pool:
        create = server.openai.chat.completions.create
        options: dict[str, Any] = {**LONG, "max_tokens": 200, "extra_body": ENDLESS}
        stream = create(**options, stream=True)
        chunks = [next(stream)]
        held = unfinished(server)  # the drain waits for it, however fast the others are
        whole = pool.submit(create, **options)
        eventually(lambda: server.metric("piecework_requests_received_total") == 2)
        server.signal(signal.SIGTERM)
        eventually(lambda: server.get("/health").status_code == 503)
        assert server.get("/health").json()["status"] == "draining"
        late = server.post("/v1/completions", {"prompt": "a"})
        assert late.status_code == 503 and late.json()["error"]["code"] == "shutdown"
        assert "shutting down" in late.json()["error"]["message"] and late.headers["retry-after"]
        held.close()
        chunks += list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
        assert sum(bool(chunk.choices[0].delta.content) for chunk in chunks) > 50
        assert whole.result(30).usage.completion_tokens == 200
        assert server.wait() == 0
        assert "Traceback" not in server.log


@pytest.mark.slow
def test_a_second_signal_ends_at_once(folder: str, tmp_path: Path) -> None:
    with start(folder, tmp_path / "log") as server:
        stream = server.openai.chat.completions.create(**LONG, stream=True, extra_body=ENDLESS)
        next(stream)
        server.signal(signal.SIGINT)
        eventually(lambda: server.get("/health").status_code == 503)
        begun = time.time()
        server.signal(signal.SIGTERM)
        assert server.wait() == 128 + signal.SIGTERM and time.time() - begun < 10


def test_a_taken_port_is_an_error_before_the_model_is_loaded(server: ServerProcess, tmp_path: Path) -> None:
    port = server.url.rsplit(":", 1)[1]
    with pytest.raises(AssertionError, match=f"port={port} is not allowed: a port that is free"):
        ServerProcess("no/such/model", "--port", port, log=tmp_path / "log")
