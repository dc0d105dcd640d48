"""`serve`: load the model, listen, and on SIGTERM finish what runs before ending."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import uvicorn

from piecework.collector import imports_stay
from piecework.config import EngineConfig, ServerConfig
from piecework.errors import ConfigError
from piecework.server.app import create_app
from piecework.server.connection import Connection
from piecework.server.lifecycle import Lifecycle

if TYPE_CHECKING:
    from piecework.engine.service import Service

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_LAST_SECONDS = 3
"""What answers get to leave after the drain; a client that reads nothing is cut off then."""


def serve(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    on_ready: Callable[[str], None] | None = None,
) -> int:
    """Serve until a signal ends it; return the exit code.

    The first SIGTERM or SIGINT drains: new requests get 503, running ones finish within
    `drain_timeout`. A second one ends the process at once. `on_ready` gets the URL when requests are
    taken. Raises ConfigError (before the model is loaded, where the port is taken) and ModelError.
    """
    config = _with_key(server_config)
    with closing(_bind(config.host, config.port)) as listener, closing(_load(engine_config)) as service:
        app = create_app(service, config)
        settings = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=_LAST_SECONDS,
        )
        server = Server(settings, app.state.server.lifecycle, config, on_ready)
        server.run(sockets=[listener])
    return 0


class Server(uvicorn.Server):
    """uvicorn's server, except that a signal drains first and stops listening after that."""

    def __init__(
        self,
        settings: uvicorn.Config,
        lifecycle: Lifecycle,
        config: ServerConfig,
        on_ready: Callable[[str], None] | None,
    ) -> None:
        super().__init__(settings)
        self._lifecycle = lifecycle
        self._host = config.host
        self._drain_timeout = config.drain_timeout
        self._on_ready = on_ready
        self._drain: asyncio.Task[None] | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take the signals while serving. Only the main thread may; elsewhere the owner stops the server."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.signalled, number)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and tell that requests are taken."""
        await super().startup(sockets)
        if self.started and sockets and self._on_ready is not None:
            self._on_ready(_url(self._host, sockets[0]))

    def signalled(self, number: int) -> None:
        """The first signal drains, the second one ends the process."""
        name = signal.Signals(number).name
        if self._drain is not None:
            logger.warning("%s again: ending at once", name)
            os._exit(128 + number)
        logger.warning(
            "%s: requests in flight: %d; they get %g s", name, self._lifecycle.in_flight, self._drain_timeout
        )
        self._drain = asyncio.ensure_future(self._finish())

    async def _finish(self) -> None:
        cut = await self._lifecycle.drain(self._drain_timeout)
        if cut:
            logger.warning("%d requests were cut off: drain_timeout=%g s passed", cut, self._drain_timeout)
        self.should_exit = True


def _load(config: EngineConfig) -> Service:
    with imports_stay():  # seconds, which a mistake in the settings need not wait for
        from piecework.engine.data_parallel import make_service
        from piecework.engine.threads import leave_core

    return make_service(leave_core(config))


def _with_key(config: ServerConfig) -> ServerConfig:
    """Take the key from the environment where none is given; an empty one would protect nothing."""
    if config.api_key is None:
        return replace(config, api_key=os.environ.get("PIECEWORK_API_KEY") or None)
    if not config.api_key.strip():
        raise ConfigError("api_key", config.api_key, "a key that is not empty, or no --api-key at all")
    return config


def _bind(host: str, port: int) -> socket.socket:
    """Take the port, so that a taken one is an error now and not after the model was loaded."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError("host", host, f"an address of this machine ({error})") from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError("port", port, f"a port that is free on {host} ({error.strerror})") from error
    return listener


def _url(host: str, listener: socket.socket) -> str:
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{listener.getsockname()[1]}"
