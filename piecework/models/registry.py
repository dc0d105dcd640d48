"""The model classes by the name that config.json lists under `architectures`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from piecework.models.architectures import ARCHITECTURES, known_architectures, pick

if TYPE_CHECKING:
    from piecework.models.decoder import CausalLM

__all__ = ["known_architectures", "model_class"]


def model_class(architecture: str) -> type[CausalLM]:
    """Return the class of `architecture`; `ModelError` lists the known ones if it is not among them."""
    name = pick(architecture)
    module = importlib.import_module(f"piecework.models.{ARCHITECTURES[name].module}")
    found: type[CausalLM] = getattr(module, name)
    return found
