"""What a device makes of a compiler's name: its own, one that stands in for it, or a refusal."""

from __future__ import annotations

import pytest
import torch

from piecework.config import EngineConfig
from piecework.devices.base import StandIn
from piecework.devices.sim import SimDevice
from piecework.errors import ConfigError
from piecework.models.config import ModelConfig
from piecework.runner.recipe import Recipe, make_recipe

MODEL = ModelConfig.from_dict(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "max_position_embeddings": 64,
    }
)


class NoInductor(SimDevice):
    """A device that inductor has no code for."""

    compilers = ("eager", "dynamo")
    stand_ins = (StandIn("inductor", "eager", "inductor writes no code for it"),)


def recipe(**settings: object) -> Recipe:
    config = EngineConfig.from_flat({"compilation_config": settings})
    return make_recipe(config, NoInductor(capacity=1 << 20), MODEL, torch.float32, 64)


def test_another_compiler_stands_in_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert recipe(compiler="inductor").compiler.name == "eager"
    said = "compiler=inductor becomes eager on the device sim: inductor writes no code for it"
    assert caplog.messages.count(said) == 1
    caplog.clear()
    assert recipe().compiler.name == recipe(compiler="eager").compiler.name == "eager"
    assert said not in caplog.messages


def test_in_strict_mode_nothing_stands_in() -> None:
    with pytest.raises(
        ConfigError, match=r"^compiler='inductor' is not allowed: eager on the device sim, where"
    ):
        recipe(compiler="inductor", strict=True)


def test_a_compiler_without_one_that_stands_in_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^compiler='native' .* one of eager, dynamo:<backend>, which the device"
    ):
        recipe(compiler="native")
