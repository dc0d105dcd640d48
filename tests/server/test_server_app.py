"""The application and its connection in this process: what a healthy server never shows."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request

from piecework.config import EngineConfig, ServerConfig
from piecework.engine.service import Service
from piecework.server.app import create_app
from piecework.server.connection import Connection
from piecework.server.errors import ApiError
from piecework.server.protocol import TokenizeRequest
from piecework.server.reading import read_request


@pytest.fixture(scope="module")
def service(folder: str) -> Iterator[Service]:
    running = Service(
        EngineConfig.from_flat({"model": folder, "dtype": "float32", "threads": 1, "num_pages": 300})
    )
    yield running
    running.close()


def ask(app: FastAPI, work: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await work(client)

    return asyncio.run(run())


def test_an_unexpected_error_is_a_bare_500_and_in_the_log(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    app = create_app(service, ServerConfig())

    def broken() -> None:
        raise ZeroDivisionError("a secret of the inside")

    app.add_api_route("/broken", broken)
    answer = ask(app, lambda client: client.get("/broken", headers={"X-Request-Id": "r1"}))
    assert answer.status_code == 500 and answer.headers["x-request-id"] == "r1"
    assert answer.json()["error"]["code"] == "internal_error" and "secret" not in answer.text
    assert "a secret of the inside" in caplog.text


def test_each_app_has_its_own_metrics(service: Service) -> None:
    first, second = (create_app(service, ServerConfig()) for _ in range(2))
    ask(first, lambda client: client.get("/version"))
    series = 'route="/version",status="200"} 1.0'
    assert series in ask(first, lambda client: client.get("/metrics")).text
    assert series not in ask(second, lambda client: client.get("/metrics")).text


def test_a_stopped_engine_is_503(folder: str) -> None:
    stopped = Service(EngineConfig.from_flat({"model": folder, "num_pages": 10}))
    stopped.close()
    app = create_app(stopped, ServerConfig())
    answer = ask(app, lambda client: client.post("/v1/completions", json={"prompt": "a"}))
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_dead"
    stream = {"prompt": "a", "stream": True}
    assert ask(app, lambda client: client.post("/v1/completions", json=stream)).status_code == 503


def test_a_long_text_does_not_hold_up_the_event_loop(service: Service) -> None:
    app = create_app(service, ServerConfig())

    async def work(client: httpx.AsyncClient) -> tuple[int, int]:
        body = {"prompt": "the cat on the mat. " * 25_000}
        request = asyncio.ensure_future(client.post("/tokenize", json=body))
        turns = 0
        while not request.done():
            await asyncio.sleep(0.005)
            turns += 1
        return request.result().json()["count"], turns

    count, turns = ask(app, work)
    assert count > 100_000
    assert turns > 15  # 2 or 3 where the loop waits for the tokenizer


def test_a_body_that_comes_too_slowly_is_408() -> None:
    async def receive() -> Any:
        await asyncio.sleep(5)

    headers = [(b"content-type", b"application/json")]
    request = Request({"type": "http", "method": "POST", "headers": headers}, receive)
    with pytest.raises(ApiError) as caught:
        asyncio.run(read_request(request, TokenizeRequest, 100, seconds=0.05))
    assert caught.value.status == 408 and "0.05 seconds" in caught.value.message


class Impatient(Connection):
    """Waits for headers only for a moment, in which a busy machine can send them."""

    header_seconds = 1.0


async def tiny_app(scope: Any, receive: Any, send: Any) -> None:
    await asyncio.sleep(1.3)  # an answer may take longer than headers
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture
def impatient_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(tiny_app, http=Impatient, ws="none", lifespan="off", log_config=None)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield listener.getsockname()[1]
        server.should_exit = True
        thread.join(10)


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\n"])
def test_headers_that_never_end_are_cut_off(impatient_port: int, sent: bytes) -> None:
    begun = time.time()
    with socket.create_connection(("127.0.0.1", impatient_port), timeout=10) as connection:
        connection.sendall(sent)
        assert connection.recv(100) == b""  # within the timeout
    assert time.time() - begun > 0.9


def test_whole_requests_take_their_time(impatient_port: int) -> None:
    with socket.create_connection(("127.0.0.1", impatient_port), timeout=10) as connection:
        for _ in range(2):
            connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = b""
            while not answer.endswith(b"ok"):
                piece = connection.recv(1000)
                assert piece, "the connection was closed before the answer"
                answer += piece
            assert b" 200 " in answer
        connection.sendall(b"GET / HT")  # a later request has the limit too
        assert connection.recv(100) == b""
