"""The ASGI application: routes inside, middleware around them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from fastapi.responses import Response

from piecework.config import ServerConfig
from piecework.server.admin import admin_router
from piecework.server.chat import chat_router
from piecework.server.completions import completion_router
from piecework.server.errors import install_handlers
from piecework.server.info import info_router
from piecework.server.middleware import ApiKey, DrainGate, RequestScope
from piecework.server.state import ServerState
from piecework.server.streaming import ClientGone
from piecework.server.tokens import token_router

if TYPE_CHECKING:
    from piecework.engine.service import Service


def create_app(service: Service, config: ServerConfig) -> FastAPI:
    """Make the application for a running service; `app.state.server` is its `ServerState`.

    It sends no CORS headers: pages of other origins may not call it.
    """
    app = FastAPI(title="Piecework", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    state = ServerState(service, config)
    app.state.server = state
    service.observers.append(state.metrics)
    for router in (chat_router, completion_router, token_router, info_router, admin_router):
        app.include_router(router(state))
    install_handlers(app)

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it; the number is nginx's for the log

    app.add_exception_handler(ClientGone, gone)
    # Each one added wraps those before it.
    if config.api_key:
        app.add_middleware(ApiKey, key=config.api_key)
    app.add_middleware(DrainGate, lifecycle=state.lifecycle)
    app.add_middleware(RequestScope, lifecycle=state.lifecycle, metrics=state.metrics)
    return app
