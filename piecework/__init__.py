"""Piecework: an engine that serves large language models on whatever device is there.

Importing the package is cheap; torch is imported when a model is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from piecework.version import __version__

if TYPE_CHECKING:
    from piecework.config import EngineConfig
    from piecework.llm import LLM
    from piecework.sampling import SamplingParams

__all__ = ["LLM", "EngineConfig", "SamplingParams", "__version__"]

_EXPORTS = {
    "LLM": "piecework.llm",
    "EngineConfig": "piecework.config",
    "SamplingParams": "piecework.sampling",
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'piecework' has no attribute {name!r}; it has {', '.join(__all__)}")
    from importlib import import_module

    return getattr(import_module(_EXPORTS[name]), name)
