"""A tiny Qwen3 on disk, and services on it."""

from __future__ import annotations

import pytest
from carried_rig import undisturbed
from tiny import save_tiny

from piecework.config import EngineConfig
from piecework.engine.service import Service
from piecework.runner.runner import Runner


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


@pytest.fixture(scope="module")
def clean(folder):
    """What `carried_rig.collect` gives where no device fails."""
    return undisturbed(folder, ())[0]


@pytest.fixture
def executed(monkeypatch):
    """The device of each step that ran, and its items."""
    steps, examine = [], Runner.examine

    def noted(self, items):
        steps.append((self.device.name, items))
        return examine(self, items)

    monkeypatch.setattr(Runner, "examine", noted)
    return steps
