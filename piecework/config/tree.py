"""The whole tree of settings, and those of the server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from piecework.compilation import CompilationConfig
from piecework.config.devices import AuditConfig, DeviceConfig, WorkerConfig
from piecework.config.fields import LONGEST_WAIT, build, check, select, setting
from piecework.config.file import read_yaml
from piecework.config.load import LoadConfig
from piecework.config.scheduling import CacheConfig, SchedulerConfig
from piecework.errors import ConfigError

DEFAULT_COMPILATION = CompilationConfig()


@dataclass(frozen=True)
class EngineConfig:
    """All settings of an engine, as a tree; `from_flat` builds it from plain keyword arguments."""

    load: LoadConfig = field(default_factory=LoadConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    compilation_config: CompilationConfig = setting(  # noqa: RUF009 - it returns a field
        DEFAULT_COMPILATION, "how programs are made, as a JSON object (default: the device's choice)"
    )
    profile: bool = setting(False, "time the stages of every step")
    log_level: str = setting("warning", "what is logged", choices=("debug", "info", "warning", "error"))

    def __post_init__(self) -> None:
        check(self)
        if self.device.isolate and self.worker.workers == "inline":
            raise ConfigError("isolate", True, "false with workers=inline, which runs every device in here")
        if self.cache.kv_strategy != "static":
            return
        for name in ("data_parallel_size", "tensor_parallel_size"):
            if (size := getattr(self.worker, name)) > 1:
                raise ConfigError(name, size, "1 with kv_strategy=static")
        if self.worker.workers == "process":
            raise ConfigError("workers", "process", "inline or auto with kv_strategy=static")
        if self.device.isolate:
            raise ConfigError("isolate", True, "false with kv_strategy=static, which runs inline only")

    @classmethod
    def from_flat(cls, values: Mapping[str, Any]) -> EngineConfig:
        """Build the tree from leaf names; an unknown name is refused with the list of known ones."""
        return build(cls, dict(values))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], overrides: Mapping[str, Any] = {}) -> EngineConfig:
        """Read a YAML file, flat or in sections (`cache: {page_size: 16}`); `overrides` win.

        The file may hold settings of the server too; they are checked and left to it.
        """
        return build(cls, {**select(cls, read_file(path)), **overrides})


@dataclass(frozen=True)
class ServerConfig:
    """The HTTP server."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on; 0 takes a free one", low=0, high=65535)
    api_key: str | None = setting(None, "clients must send it as a bearer token (env: PIECEWORK_API_KEY)")
    max_body_bytes: int = setting(8 * 2**20, "largest request body", size=True)
    drain_timeout: float = setting(30.0, "seconds that running requests get after SIGTERM", high=LONGEST_WAIT)

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class Settings:
    """All that a configuration file may hold; each command takes its own part."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)

    def __post_init__(self) -> None:
        check(self)


def read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a YAML file into leaf names and values of `Settings`; see `read_yaml`."""
    return read_yaml(path, Settings)
