"""/admin/kv and /admin/device: only with the API key, what there is then, and clear refusals."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from piecework.config import EngineConfig, ServerConfig
from piecework.engine.service import Service
from piecework.server.app import create_app

KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def service(folder: str) -> Iterator[Service]:
    settings = {"model": folder, "dtype": "float32", "threads": 1, "max_model_len": 256, "device": "cpu,sim"}
    running = Service(EngineConfig.from_flat({**settings, "num_pages": 100, "max_num_pages": 200}))
    yield running
    running.close()


def ask(
    service: Service, key: str | None, method: str, path: str = "/admin/kv", **options: Any
) -> httpx.Response:
    app = create_app(service, ServerConfig(api_key=key))

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **options)

    return asyncio.run(run())


def test_pages_are_changed_and_shown(service: Service) -> None:
    for pages in (150, 40, 100):
        answer = ask(service, "secret", "POST", json={"pages": pages}, headers=KEY)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert (found["pages"], found["min_pages"], found["max_pages"]) == (pages, 17, 200)
        shown = ask(service, "secret", "GET", headers=KEY).json()
        assert shown == {**found, "moved_pages": 0, "preempted": 0}
        assert shown["bytes"] == service.kv_bytes and service.runner.cache.num_pages == pages


def test_nobody_without_the_key(service: Service) -> None:
    for key, headers, status, code in (
        ("secret", {}, 401, "invalid_api_key"),
        ("secret", {"Authorization": "Bearer other"}, 401, "invalid_api_key"),
        (None, {}, 403, "api_key_not_set"),
        (None, KEY, 403, "api_key_not_set"),
    ):
        for path, body in (("/admin/kv", {"pages": 50}), ("/admin/device", {"device": "sim"})):
            for method, options in (("POST", {"json": body}), ("GET", {})):
                answer = ask(service, key, method, path, headers=headers, **options)
                assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert service.runner.cache.num_pages == 100 and service.device_name == "cpu"


def test_what_cannot_be_says_what_can(service: Service) -> None:
    for body, status, message in (
        (
            {"pages": 16},
            409,
            "pages=16 is not allowed: at least 17, the dummy page and one request of max_mod",
        ),
        ({"pages": 201}, 409, "at most 200, the max_num_pages"),
        ({"pages": "many"}, 400, "pages='many' is not allowed"),
        ({}, 400, "pages is missing"),
        ({"page": 3}, 400, "did you mean pages?"),
        ({"pages": 50, "model": "other"}, 404, "is not served here"),
    ):
        answer = ask(service, "secret", "POST", json=body, headers=KEY)
        assert answer.status_code == status and message in answer.json()["error"]["message"], answer.text
    assert service.runner.cache.num_pages == 100


def test_a_device_is_moved_to_and_back(service: Service) -> None:
    def move(body: dict[str, Any]) -> httpx.Response:
        return ask(service, "secret", "POST", "/admin/device", json=body, headers=KEY)

    for device, status in (("sim", "degraded"), ("cpu", "ok"), ("cpu", "ok")):
        answer = move({"device": device})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert (found["device"], found["status"], found["devices"]) == (device, status, ["cpu", "sim"])
        assert ask(service, "secret", "GET", "/admin/device", headers=KEY).json() == found
    assert [(event["from"], event["to"]) for event in found["events"]] == [("cpu", "sim"), ("sim", "cpu")]
    answer = move({"device": "npu"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unknown_device")
    assert "device='npu' is not allowed: one of cpu, sim" in answer.json()["error"]["message"]
    assert move({}).status_code == move({"device": 3}).status_code == 400


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"cpu",
        b"null",
        b"[]",
        b'["cpu"]',
        b'{"device": null}',
        b'{"device": ""}',
        b'{"device": "cpu,sim"}',
        b'{"device": " sim"}',
        b'{"device": ["sim"]}',
        b'{"device": {"sim": 1}}',
        rb'{"device": "sim\u0000"}',
        rb'{"device": "\ud800"}',
        b'{"device": "sim", "force": true}',
        b'{"device": "sim"',
        b"\xff\xfe",
        b'{"device": "' + b"x" * 100_000 + b'"}',
    ],
)
def test_rubbish_moves_nothing(service: Service, content: bytes) -> None:
    moves = len(service.failovers())
    headers = {**KEY, "Content-Type": "application/json"}
    answer = ask(service, "secret", "POST", "/admin/device", content=content, headers=headers)
    assert answer.status_code == 400 and answer.json()["error"]["message"], answer.text
    assert len(service.failovers()) == moves and service.device_name == "cpu"
