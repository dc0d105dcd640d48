"""The default model's file, for tests that need a real one."""

from __future__ import annotations

from pathlib import Path

import pytest

from piecework.errors import ModelError
from piecework.weights.source import resolve


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The path of the default model's GGUF file; tests are skipped where it cannot be fetched."""
    try:
        return resolve("smollm2-135m").path
    except ModelError as error:
        pytest.skip(f"the default model cannot be had here: {error}")
