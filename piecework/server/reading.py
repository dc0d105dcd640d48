"""From the bytes of a request to a checked request model, with one readable sentence when that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import ClientDisconnect

from piecework.errors import RequestError
from piecework.server.errors import ApiError
from piecework.server.fields import screen

BODY_SECONDS = 60.0
_DISCARD_SECONDS = 2.0
_IN_THREAD_BYTES = 64 * 1024

RequestModel = TypeVar("RequestModel", bound=BaseModel)


async def read_request(
    request: Request, model: type[RequestModel], max_bytes: int, seconds: float = BODY_SECONDS
) -> RequestModel:
    """Read and check a JSON body of at most `max_bytes` that arrives within `seconds`.

    Raises ApiError (408, 413, 415) or RequestError.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        shown = kind[:80] or "none"
        message = f"Content-Type {shown} is not allowed: send the body as application/json"
        raise ApiError(415, message, code="unsupported_media_type")
    body = await _read_body(request, max_bytes, seconds)
    if len(body) < _IN_THREAD_BYTES:
        return parse(model, body)
    return await asyncio.to_thread(parse, model, body)


def parse(model: type[RequestModel], body: bytes) -> RequestModel:
    """Check a JSON body against a request model. Raises RequestError, which names the field."""
    if not body.strip():
        raise RequestError("the body is empty: send a JSON object", code="invalid_json")
    try:
        values = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(values, dict):
        message = f"the body is a JSON {_json_name(values)}: send a JSON object"
        raise RequestError(message, code="invalid_json")
    try:
        return model.model_validate(screen(values, model.model_fields))
    except ValidationError as error:
        raise _translate(model, error.errors(include_url=False)) from error


async def _read_body(request: Request, max_bytes: int, seconds: float) -> bytes:
    """Collect the body, counting what really arrives: a chunked body brings no length."""
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > max_bytes:
        await _discard(request)
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    break
    except TimeoutError as error:
        message = f"the body did not arrive within {seconds:g} seconds"
        raise ApiError(408, message, code="request_timeout", headers={"Connection": "close"}) from error
    except ClientDisconnect as error:
        raise ApiError(400, "the client left before the body was complete", code="disconnected") from error
    if len(body) > max_bytes:
        await _discard(request)
        raise _too_large(max_bytes)
    return bytes(body)


async def _discard(request: Request) -> None:
    """Take in the rest for a moment: a client that still sends would lose the answer to a reset."""
    try:
        async with asyncio.timeout(_DISCARD_SECONDS):
            while True:
                message = await request.receive()
                if message["type"] != "http.request" or not message.get("more_body"):
                    return
    except TimeoutError:
        return


def _too_large(max_bytes: int) -> ApiError:
    message = f"the body is larger than {max_bytes} bytes, which is the limit (max_body_bytes)"
    return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})


_ALLOWED = {
    "string_type": "a string",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}


def _translate(model: type[BaseModel], errors: Sequence[ErrorDetails]) -> RequestError:
    """Turn the first of pydantic's errors into a sentence with field, value and what is allowed."""
    first = errors[0]
    param = _path(first["loc"])
    if first["type"] == "missing":
        return RequestError(f"{param} is missing: it is required", param=param, code="missing_parameter")
    if first["type"] == "extra_forbidden":
        return RequestError(f"{param} is not a known field", param=param, code="unknown_parameter")
    field = model.model_fields.get(str(first["loc"][0])) if first["loc"] else None
    allowed = field.description if field is not None and field.description else _allowed(first)
    message = f"{param}={shorten(first['input'])} is not allowed: {allowed}"
    return RequestError(message, param=param, code="invalid_type")


def _allowed(error: ErrorDetails) -> str:
    context: dict[str, Any] = error.get("ctx", {})
    match error["type"]:
        case "greater_than_equal":
            return f"at least {context['ge']}"
        case "less_than_equal":
            return f"at most {context['le']}"
    return _ALLOWED.get(error["type"], error["msg"])


def _path(loc: Sequence[int | str]) -> str:
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def shorten(value: Any, limit: int = 80) -> str:
    """Show a value in a message: at most about `limit` characters, whatever it is."""
    if isinstance(value, int) and abs(value) >= 10**limit:
        return "a number of more than 80 digits"
    if isinstance(value, str | list):
        text = repr(value[:limit])
    elif isinstance(value, dict):
        text = "an object" if len(value) > 4 else repr(value)
    else:
        text = repr(value)
    return text if len(text) <= limit + 2 else text[:limit] + "..."


def _json_name(value: Any) -> str:
    return {list: "array", str: "string", bool: "boolean", type(None): "null"}.get(type(value), "number")
