"""A tiny Qwen3 on disk, and services on it."""

from __future__ import annotations

import pytest
from tiny import save_tiny

from piecework.config import EngineConfig
from piecework.engine.service import Service


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("qwen3"), "qwen3", tokenizer=True)


@pytest.fixture
def make_service(folder):
    """Start services; what a test leaves open is closed."""
    services = []

    def make(**settings):
        values = {"model": str(folder), "dtype": "float32", "threads": 1, **settings}
        services.append(Service(EngineConfig.from_flat(values)))
        return services[-1]

    yield make
    for service in services:
        service.close()
