"""Make a model for a config: allocated, not loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from piecework.errors import ConfigError
from piecework.models.config import ModelConfig
from piecework.models.registry import model_class

if TYPE_CHECKING:
    from piecework.models.decoder import CausalLM


def build_model(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str, max_positions: int
) -> CausalLM:
    """Allocate the model of `config` in `dtype` on `device`, in evaluation mode.

    Parameters are uninitialised; `piecework.weights.load` fills them. The rotary table has
    `max_positions` rows and is filled.
    """
    if max_positions < 1:
        raise ConfigError("max_positions", max_positions, "a positive integer")
    model = model_class(config.architecture)(config, max_positions, dtype=dtype, device=device)
    return model.eval()
