"""Requests that cannot be served: the status, the form of the body, and the field it names."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from server_process import ServerProcess

CHAT = "/v1/chat/completions"
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
JSON = {"Content-Type": "application/json"}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """Check the form that every error has, and return it."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"]
    assert "Traceback" not in response.text and len(body["error"]["message"]) < 1500
    error: dict[str, Any] = body["error"]
    return error


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", 0),
        ("max_completion_tokens", -5),
        ("max_tokens", "many"),
        ("max_tokens", 10**40),
        ("temperature", -1),
        ("top_p", 2),
        ("n", 0),
        ("n", 100_000),
        ("stop", 5),
        ("logit_bias", {"cat": 1}),
        ("logit_bias", {"999999": 1}),
        ("stop_token_ids", [-1]),
        ("seed", 1.5),
        ("top_logprobs", 3),
        ("messages", []),
        ("tools", [{"type": "function"}]),
        ("response_format", {"type": "json_object"}),
        ("modalities", ["audio"]),
        ("unheard_of", 1),
        ("chat_template_kwargs", {"messages": []}),
    ],
)
def test_the_field_is_named(server: ServerProcess, field: str, value: Any) -> None:
    error = error_of(server.post(CHAT, {"messages": MESSAGES, field: value}), 400)
    assert error["param"] == field and field in error["message"]
    assert error["type"] == "invalid_request_error" and error["code"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", ""),
        ("prompt", []),
        ("prompt", 5),
        ("prompt", ["a", 5]),
        ("prompt", [1, "a"]),
        ("prompt", [[1], 5]),
        ("suffix", "end"),
        ("best_of", 3),
        ("logprobs", 50),
        ("logprobs", True),
        ("messages", MESSAGES),
    ],
)
def test_the_field_of_a_completion_is_named(server: ServerProcess, field: str, value: Any) -> None:
    error = error_of(server.post("/v1/completions", {"prompt": "hi", field: value}), 400)
    assert error["param"] == field and field in error["message"]


@pytest.mark.parametrize("ids", [[0, 320], [-1], [1.5], [True], [2**70]])
def test_token_ids_are_of_the_vocabulary(server: ServerProcess, ids: list[Any]) -> None:
    error = error_of(server.post("/v1/completions", {"prompt": ids}), 400)
    assert error["param"] == "prompt" and "319" in error["message"]
    error = error_of(server.post("/v1/completions", {"prompt": [[5], ids]}), 400)
    assert error["param"] == "prompt[1]"
    error_of(server.post("/detokenize", {"tokens": ids}), 400)


def test_the_openai_client_raises_its_own_errors(server: ServerProcess) -> None:
    client = server.openai
    with pytest.raises(openai.BadRequestError, match="max_tokens=-1") as bad:
        client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=-1)
    assert bad.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError, match="gpt-4") as missing:
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        list(client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=-1, stream=True))


def test_a_prompt_that_is_too_long(server: ServerProcess) -> None:
    for path, body, param in (
        ("/v1/completions", {"prompt": "x" * 5000}, "prompt"),
        ("/v1/completions", {"prompt": ["x", "x" * 5000]}, "prompt[1]"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 5000}], "stream": True}, "messages"),
    ):
        error = error_of(server.post(path, body), 400)
        assert error["code"] == "context_length_exceeded" and error["param"] == param
        assert "4096" in error["message"] and "50" in error["message"]
    error = error_of(server.post("/v1/completions", {"prompt": "x" * 100, "max_tokens": 4000}), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert all(number in error["message"] for number in ("4000", "100", "4096", "3996"))


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff", b'{"prompt": NaN}', b'{"prompt": "\\ud800"}', b"[" * 50_000, b"[]"]
)
def test_a_body_that_is_no_json_object(server: ServerProcess, body: bytes) -> None:
    error = error_of(server.post("/v1/completions", content=body, headers=JSON), 400)
    assert error["code"] == "invalid_json" and "JSON" in error["message"]


def test_paths_methods_and_media_types(server: ServerProcess) -> None:
    assert "/v1/nothing" in error_of(server.get("/v1/nothing"), 404)["message"]
    assert error_of(server.get(CHAT), 405)["code"] == "method_not_allowed"
    for headers in ({"Content-Type": "text/plain"}, {"Content-Type": ""}, {}):
        assert (
            error_of(server.post(CHAT, content=b"{}", headers=headers), 415)["code"]
            == "unsupported_media_type"
        )
    fine = {"Content-Type": "Application/JSON; charset=utf-8"}
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    assert server.post("/v1/completions", content=body, headers=fine).status_code == 200


def test_a_body_over_the_limit(server: ServerProcess) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(100):
            yield b"x" * 65536

    for content in (b"x" * 200_001, b"x" * 10**7, pieces()):  # the last one brings no length
        error = error_of(server.post(CHAT, content=content, headers=JSON), 413)
        assert "200000 bytes" in error["message"] and "max_body_bytes" in error["message"]


def test_bytes_that_are_not_http(server: ServerProcess) -> None:
    port = int(server.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(b"what is this\r\n\r\n")
        answer = connection.makefile("rb").read()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b" 400 " in head and json.loads(body)["error"]["code"] == "invalid_http"


def test_request_ids_are_echoed_or_made(server: ServerProcess) -> None:
    def echoed(sent: str, path: str = "/version") -> str:
        return server.get(path, headers={"X-Request-Id": sent}).headers["x-request-id"]

    assert echoed("run-7.a:b") == "run-7.a:b"
    assert echoed("run-8", "/nothing") == "run-8"
    for bad in ("a b", "x" * 129, "", 'a"b'):
        made = echoed(bad)
        assert made != bad and len(made) == 32
    assert server.get("/version").headers["x-request-id"] != server.get("/version").headers["x-request-id"]


def test_no_cors_headers(server: ServerProcess) -> None:
    answer = server.get("/version", headers={"Origin": "http://example.com"})
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_errors_are_counted(server: ServerProcess) -> None:
    series = f'piecework_http_requests_total{{method="POST",route="{CHAT}",status="400"}}'
    server.post(CHAT, {})
    before = server.metric(series)
    server.post(CHAT, {})
    assert server.metric(series) == before + 1
