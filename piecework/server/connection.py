"""uvicorn's HTTP connection with a time limit for headers, and JSON for what is not HTTP.

Without a limit, connections that never finish a request line stay open for good.
"""

from __future__ import annotations

import asyncio
from typing import cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from piecework.server.errors import ApiError
from piecework.server.streaming import encode_json


class Connection(H11Protocol):
    """Closes itself when a request's headers are not complete after `header_seconds`."""

    header_seconds = 30.0
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the clock for the first request."""
        super().connection_made(cast(asyncio.Transport, transport))
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Stop the clock once the headers are there; start it for the next request on its first byte."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._stop()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP."""
        body = encode_json(ApiError(400, msg, code="invalid_http").body()).encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        for event in (
            h11.Response(status_code=400, headers=headers, reason="Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.header_seconds, self.transport.close)

    def _stop(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
