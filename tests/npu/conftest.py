"""Fixtures for tests of the device `npu`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from npu_tokens import DEFAULT_VOCABULARY, VOCABULARY, run
from tiny import save_tiny
from twin_npu import float32 as float32
from twin_npu import twin as twin

from piecework.engine.result import Result
from piecework.errors import ModelError
from piecework.weights.source import resolve


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Give the folder of a tiny model by its kind."""

    @cache
    def make(kind: str) -> str:
        return str(save_tiny(tmp_path_factory.mktemp(kind), kind, num_hidden_layers=2))

    return make


@pytest.fixture(scope="session")
def expected(tiny_path: Callable[[str], str]) -> Callable[[str, str], list[Result]]:
    """Give what the eager engine on the CPU says, by the kind of a tiny model and its quantisation."""

    @cache
    def make(kind: str, quantization: str = "auto") -> list[Result]:
        config = {"compiler": "eager", "passes": []}
        settings = {"device": "cpu", "quantization": quantization, "compilation_config": config}
        return run(tiny_path(kind), settings, VOCABULARY)[0]

    return make


@pytest.fixture(scope="session")
def default_expected() -> list[Result]:
    """What the CPU says with the default model."""
    try:
        resolve("smollm2-135m")
    except ModelError as error:
        pytest.skip(f"the default model can't be had here: {error}")
    return run("smollm2-135m", {"device": "cpu"}, DEFAULT_VOCABULARY, 32)[0]
