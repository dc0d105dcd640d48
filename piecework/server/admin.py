"""GET and POST /admin/kv, how many pages the KV cache has, and /admin/device, which device is in use.

Only a server with an API key has these paths.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request

from piecework.errors import EngineDeadError, RequestError
from piecework.server.errors import ApiError
from piecework.server.protocol import DeviceRequest, KVRequest
from piecework.server.reading import read_request
from piecework.server.state import ServerState

_CONFLICTS = ("kv_pages_needed", "kv_pages_limit", "out_of_memory", "not_resizable")


def admin_router(state: ServerState) -> APIRouter:
    """The routes, bound to one server's state."""
    router = APIRouter()

    def refuse_without_key() -> None:
        if state.config.api_key is None:
            message = "this path changes the server for everybody: start it with --api-key to have it"
            raise ApiError(403, message, code="api_key_not_set")

    async def show() -> dict[str, Any]:
        refuse_without_key()
        return asdict(await asyncio.to_thread(state.service.kv_size))

    async def resize(request: Request) -> dict[str, Any]:
        refuse_without_key()
        body = await read_request(request, KVRequest, state.config.max_body_bytes)
        state.check_model(body.model)
        try:
            return asdict(await asyncio.to_thread(state.service.resize_kv, body.pages))
        except RequestError as error:
            if error.code not in _CONFLICTS:
                raise
            raise ApiError(409, str(error), param=error.param, code=error.code) from error

    async def show_device() -> dict[str, Any]:
        refuse_without_key()
        return _devices(state)

    async def move(request: Request) -> dict[str, Any]:
        refuse_without_key()
        body = await read_request(request, DeviceRequest, state.config.max_body_bytes)
        state.check_model(body.model)
        try:
            await asyncio.to_thread(state.service.move_to, body.device)
        except (RequestError, EngineDeadError):
            raise
        except Exception as error:
            message = f"{body.device} can't take over, {state.service.device_name} goes on: {error}"
            raise ApiError(409, message, param="device", code="device_failed") from error
        return _devices(state)

    router.add_api_route("/admin/device", show_device, methods=["GET"], response_model=None)
    router.add_api_route("/admin/device", move, methods=["POST"], response_model=None)
    router.add_api_route("/admin/kv", show, methods=["GET"], response_model=None)
    router.add_api_route("/admin/kv", resize, methods=["POST"], response_model=None)
    return router


def _devices(state: ServerState) -> dict[str, Any]:
    health = state.service.health()
    devices = list(state.service.config.device.devices)
    return {key: health[key] for key in ("device", "status", "events")} | {"devices": devices}
