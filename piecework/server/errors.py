"""Every error leaves the server as `{"error": {message, type, param, code}}`, the OpenAI API's form."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from piecework.errors import EngineDeadError, QueueFullError, RequestError

logger = logging.getLogger(__name__)

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """An answer that is an error: HTTP `status`, and the fields of the body.

    `param` is the request's field in the form `messages[0].role`, `code` a short reason for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        super().__init__(message)

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        kind = _TYPES.get(self.status, _TYPES[400] if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The HTTP response."""
        return JSONResponse(self.body(), self.status, self.headers)


def as_api_error(error: Exception) -> ApiError:
    """Give any exception its status; one that nobody expected is logged and becomes a bare 500."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return ApiError(400, str(error), param=error.param, code=error.code)
        case QueueFullError():
            headers = {"Retry-After": str(error.retry_after)}
            return ApiError(429, str(error), code="queue_full", headers=headers)
        case EngineDeadError():
            return ApiError(503, str(error), code="engine_dead")
        case HTTPException():
            return _from_http(error)
    logger.error("a request failed with an unexpected error", exc_info=error)
    return ApiError(500, "internal error; the server's log has the details", code="internal_error")


def install_handlers(app: FastAPI) -> None:
    """Answer every error that a route raises, and every path that has no route, in the one form."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        found = as_api_error(error)
        if isinstance(error, HTTPException) and found.status in (404, 405):
            found.message = f"{request.method} {request.url.path}: {found.message}"
        return found.response()

    for kind in (ApiError, RequestError, QueueFullError, EngineDeadError, HTTPException):
        app.add_exception_handler(kind, answer)


def _from_http(error: HTTPException) -> ApiError:
    phrases = {404: "there is no such path", 405: "this path does not take this method"}
    codes = {404: "unknown_url", 405: "method_not_allowed"}
    message = phrases.get(error.status_code, str(error.detail))
    code = codes.get(error.status_code, HTTPStatus(error.status_code).name.lower())
    return ApiError(error.status_code, message, code=code, headers=error.headers)
