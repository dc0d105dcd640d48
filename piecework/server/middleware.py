"""What stands before every route, as plain ASGI: a request id, the API key, and the drain switch.

Plain ASGI, because wrappers that buffer would hide a client's disconnect from the routes.
"""

from __future__ import annotations

import hmac
import logging
import re
import uuid

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from piecework.server.errors import ApiError, as_api_error
from piecework.server.lifecycle import Lifecycle
from piecework.server.metrics import ServerMetrics

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/version", "/metrics"})
"""Answered without the API key, and while draining: probes and scrapers seldom hold a key.
None of them tells anything of a request's content."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class RequestScope:
    """The outermost layer: the request's id on every answer, its count, and a 500 for what slips through.

    A client's `X-Request-Id` of up to 128 plain characters is echoed; otherwise one is made.
    """

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle, metrics: ServerMetrics) -> None:
        self._app = app
        self._lifecycle = lifecycle
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        status, counted = 0, False

        def count() -> None:
            nonlocal counted
            if not counted:
                self._metrics.answered(scope, status)
            counted = True

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                message = {**message, "headers": headers}
            elif message["type"] == "http.response.body" and not message.get("more_body"):
                count()  # first: who has the whole answer finds it counted
            await send(message)

        self._lifecycle.enter()
        try:
            await self._app(scope, receive, tagged)
        except Exception as error:
            answer = as_api_error(error)
            if status:
                raise  # half an answer is out; the connection has to break
            await answer.response()(scope, receive, tagged)
        finally:
            self._lifecycle.leave()
            count()
            # %r: a path is decoded, and could write lines of its own into the log.
            logger.info("%s %r %d, request id %s", scope["method"], scope["path"], status, request_id)


class DrainGate:
    """Refuses new work with 503 once the server is draining."""

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle) -> None:
        self._app = app
        self._lifecycle = lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "http" and self._lifecycle.draining and scope["path"] not in OPEN_PATHS:
            headers = {"Retry-After": "5", "Connection": "close"}
            error = ApiError(503, "the server is shutting down", code="shutdown", headers=headers)
            await error.response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class ApiKey:
    """Asks for `Authorization: Bearer <key>` everywhere but on the open paths."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._allowed(scope):
            headers = {"WWW-Authenticate": "Bearer"}
            message = "a valid API key is needed: send it as 'Authorization: Bearer <key>'"
            error = ApiError(401, message, code="invalid_api_key", headers=headers)
            await error.response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        value = next((v for name, v in scope["headers"] if name == b"authorization"), b"")
        kind, _, key = value.partition(b" ")
        return kind.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)
