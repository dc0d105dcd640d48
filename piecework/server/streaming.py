"""Answers that notice when the client goes away: server-sent events, and work for a plain answer.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html, `data:` lines only; the stream
ends with `data: [DONE]` as in the OpenAI API.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from piecework.server.errors import as_api_error

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold back small chunks
]


class ClientGone(Exception):
    """The client closed the connection before its answer was complete."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work`; cancel it and raise ClientGone as soon as the client closes the connection."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


def encode_json(value: Any) -> str:
    """Compact JSON; a number that JSON has no word for is a bug and raises ValueError."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


class EventStream(Response):
    """A stream of JSON events. `close` runs once, however the stream ends.

    An error in mid-stream becomes an event `{"error": {...}}`: the status line is long gone.
    """

    def __init__(self, events: AsyncIterator[dict[str, Any]], close: Callable[[], None]) -> None:
        super().__init__()
        self.raw_headers = list(_HEADERS)
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; ASGI calls this."""
        try:
            await until_disconnect(receive, self._send_all(send))
        except ClientGone:
            logger.info("a client left in mid-stream; its request is aborted")
        finally:
            self._close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for event in self._events:
                await _send_text(send, encode_json(event))
        except Exception as error:
            await _send_text(send, encode_json(as_api_error(error).body()))
        await _send_text(send, "[DONE]")
        await send({"type": "http.response.body", "body": b""})


async def _send_text(send: Send, text: str) -> None:
    body = f"data: {text}\n\n".encode()
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
