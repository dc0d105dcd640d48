"""Rotary frequencies and tables against transformers' own functions, and against the definition."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tiny import tiny_config

from piecework.errors import ConfigError
from piecework.layers.rotary import RotaryTable, attention_factor, inverse_frequencies, rotary_table
from piecework.models.config import ModelConfig, RopeConfig

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"factor": 4.0}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("linear", {"factor": 3.5}),
    ("llama3", {**LLAMA3, "original_max_position_embeddings": 8192, "rope_theta": 500000.0}),
    ("llama3", {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 100}),
    ("llama3", {"factor": 2.0, "low_freq_factor": 2.0, "high_freq_factor": 9.0}),
    ("yarn", {**YARN, "original_max_position_embeddings": 32768, "rope_theta": 1000000.0}),
    ("yarn", {**YARN, "original_max_position_embeddings": 64, "truncate": False}),
    ("yarn", {**YARN, "beta_fast": 20.0, "beta_slow": 2.0, "attention_factor": 1.25}),
    ("yarn", {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0}),
    ("yarn", {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0}),
    ("yarn", {"factor": 1.0, "original_max_position_embeddings": 64}),
    # Both ends of the ramp on one channel, which must not divide by zero.
    ("yarn", {**YARN, "original_max_position_embeddings": 6, "rope_theta": 10000.0}),
]


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize(("kind", "scaling"), CASES)
def test_scaled_frequencies_equal_transformers(
    kind: str, scaling: dict[str, Any], partial: float, head_dim: int
) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {
        "rope_type": kind,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 2048,
        "partial_rotary_factor": partial,
        **scaling,
    }
    if kind == "linear":
        del parameters["original_max_position_embeddings"]
    hf = tiny_config("llama", head_dim=head_dim, rope_parameters=parameters, max_position_embeddings=4096)
    expected, factor = ROPE_INIT_FUNCTIONS[kind](hf)
    config = ModelConfig.from_dict(hf.to_dict())
    assert config.rotary_dim == int(head_dim * partial)
    got = inverse_frequencies(config.rope, config.rotary_dim)
    assert torch.equal(got, expected)
    assert attention_factor(config.rope) == pytest.approx(factor, rel=1e-12)
    plain = inverse_frequencies(RopeConfig(theta=config.rope.theta), config.rotary_dim)
    assert torch.allclose(got, plain, rtol=1e-6, atol=0) == (config.rope.factor == 1)


def test_table_equals_transformers_far_out() -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    hf = tiny_config("llama", head_dim=64)
    config = ModelConfig.from_dict(hf.to_dict())
    positions = torch.tensor([0, 1, 777, 99_999])
    cos, sin = LlamaRotaryEmbedding(hf)(torch.zeros(1), positions[None])
    table = rotary_table(config.rope, 64, 100_000)[positions]
    torch.testing.assert_close(table, torch.cat((cos[0, :, :32], sin[0, :, :32]), -1), rtol=0, atol=1e-6)


def test_plain_frequencies_are_powers_of_theta() -> None:
    got = inverse_frequencies(RopeConfig(theta=100.0), 8).tolist()
    assert got == pytest.approx([100.0 ** -(2 * i / 8) for i in range(4)], rel=1e-6)


@pytest.mark.parametrize(
    "rope", [RopeConfig(), RopeConfig(type="yarn", factor=4.0, original_max_position=32)]
)
def test_table_holds_cosines_then_sines(rope: RopeConfig) -> None:
    table = rotary_table(rope, 12, 40)
    assert (table.dtype, tuple(table.shape)) == (torch.float32, (40, 12))
    scale = attention_factor(rope)
    for position in (0, 1, 39):
        angles = [position * f for f in inverse_frequencies(rope, 12).tolist()]
        expected = [math.cos(a) * scale for a in angles] + [math.sin(a) * scale for a in angles]
        assert table[position].tolist() == pytest.approx(expected, abs=1e-5)


def test_a_shorter_table_is_the_beginning_of_a_longer_one() -> None:
    assert torch.equal(rotary_table(RopeConfig(), 16, 10), rotary_table(RopeConfig(), 16, 99)[:10])


def test_module_keeps_its_table_out_of_the_checkpoint() -> None:
    module = RotaryTable(RopeConfig(), 8, 5, device=torch.device("cpu"))
    assert torch.equal(module.cos_sin, rotary_table(RopeConfig(), 8, 5))
    assert not module.state_dict()


def test_unknown_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="rope_type='dynamic' is not allowed: one of default, linear"):
        inverse_frequencies(RopeConfig(type="dynamic"), 8)
