"""What the server tells of itself: models, health, version, metrics, profile."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from piecework.server.metrics import CONTENT_TYPE
from piecework.server.state import ServerState
from piecework.version import __version__


def info_router(state: ServerState) -> APIRouter:
    """The routes, bound to one server's state. Plain functions run in a thread: they may wait for a lock."""
    router = APIRouter()
    service = state.service
    created = int(time.time())

    def model() -> dict[str, Any]:
        return {
            "id": service.model_name,
            "object": "model",
            "created": created,
            "owned_by": "piecework",
            "max_model_len": service.max_model_len,  # less where a smaller device took over
        }

    def models() -> dict[str, Any]:
        return {"object": "list", "data": [model()]}

    def one_model(name: str) -> dict[str, Any]:
        state.check_model(name)
        return model()

    def health() -> Response:
        """200 only where a generation is possible."""
        body = dict(service.health())
        if state.lifecycle.draining:
            body["status"] = "draining"
        usable = body.get("status") in ("ok", "degraded")
        return JSONResponse(body, 200 if usable else 503)

    def version() -> dict[str, str]:
        return {"version": __version__}

    def metrics() -> Response:
        return Response(state.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    def start_profile() -> dict[str, Any]:
        service.profile.reset()
        service.profile.enable()
        return {"status": "profiling"}

    def stop_profile() -> dict[str, Any]:
        service.profile.disable()
        return {"status": "stopped", "profile": service.profile.snapshot()}

    def get(path: str, endpoint: Any) -> None:
        router.add_api_route(path, endpoint, methods=["GET", "HEAD"], response_model=None)

    get("/v1/models", models)
    get("/v1/models/{name:path}", one_model)
    get("/health", health)
    get("/version", version)
    get("/metrics", metrics)
    router.add_api_route("/start_profile", start_profile, methods=["POST"], response_model=None)
    router.add_api_route("/stop_profile", stop_profile, methods=["POST"], response_model=None)
    return router
