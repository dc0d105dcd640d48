"""Rotary position embedding: the table of cosines and sines, with the usual ways to scale it.

The formulas are those of transformers' `modeling_rope_utils` (its documentation: "Utilities for Rotary
Embedding"), in the same order of operations, since an angle at position 100,000 shows the last bit of a
frequency. The original sources are named at each.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from piecework.errors import ConfigError
from piecework.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, rotary_dim: int) -> Tensor:
    """Radians per position of each rotated pair, [rotary_dim / 2] float32.

    Unscaled: theta^(-2 i / rotary_dim) (Su et al. 2021, arXiv:2104.09864, section 3.2.2). Linear: all
    divided by `factor` (Chen et al. 2023, arXiv:2306.15595).
    """
    periods = rope.theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    plain = 1.0 / periods
    if rope.type == "default":
        return plain
    if rope.type == "linear":
        return plain / rope.factor
    if rope.type == "llama3":
        return _llama3(rope, plain)
    if rope.type == "yarn":
        return _yarn(rope, periods, rotary_dim)
    raise ConfigError("rope_type", rope.type, "one of default, linear, llama3, yarn")


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Keep short waves, divide long ones by `factor`, blend between (Llama 3.1's `apply_scaling`).

    A wave is short when it fits into the original context `high_freq_factor` times or more often, and
    long when it fits `low_freq_factor` times or less often.
    """
    turns = rope.original_max_position / (2 * math.pi / plain)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = blend.clamp(0, 1)
    return (1 - keep) * plain / rope.factor + keep * plain


def _yarn(rope: RopeConfig, periods: Tensor, rotary_dim: int) -> Tensor:
    """Keep fast channels, divide slow ones by `factor`, with a ramp between (NTK by parts).

    Peng et al. 2023, arXiv:2309.00071, section 3.2. The ramp runs from the channel that turns `beta_fast`
    times in the original context to the one that turns `beta_slow` times.
    """

    def channel(turns: float) -> float:
        ratio = rope.original_max_position / (turns * 2 * math.pi)
        return rotary_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    # A ramp of no width would divide by zero; transformers widens it by the same amount.
    width = high - low or 0.001
    keep = 1 - ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    slow, fast = 1.0 / (rope.factor * periods), 1.0 / periods
    return (1 - keep) * slow + keep * fast


def attention_factor(rope: RopeConfig) -> float:
    """What cosine and sine are multiplied by: 1 but for yarn.

    Yarn's default is 0.1 ln(factor) + 1 (arXiv:2309.00071, section 3.4, the root of 1/t); where the
    config has both mscales it is the ratio of the two, as DeepSeek-V2 defines them.
    """
    if rope.type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def rotary_table(rope: RopeConfig, rotary_dim: int, max_positions: int) -> Tensor:
    """Cosines, then sines, of every position: [max_positions, rotary_dim] float32 on the CPU."""
    angles = torch.outer(
        torch.arange(max_positions, dtype=torch.float32), inverse_frequencies(rope, rotary_dim)
    )
    table = torch.empty(max_positions, rotary_dim)
    cos, sin = table.chunk(2, -1)
    torch.cos(angles, out=cos)
    torch.sin(angles, out=sin)
    return table.mul_(attention_factor(rope))


class RotaryTable(nn.Module):
    """Holds the one table that all layers of a model share, as the buffer `cos_sin`.

    It is made on the CPU, so that it is the same on every device, and stays float32.
    """

    cos_sin: Tensor

    def __init__(
        self, rope: RopeConfig, rotary_dim: int, max_positions: int, *, device: torch.device
    ) -> None:
        super().__init__()
        table = rotary_table(rope, rotary_dim, max_positions).to(device)
        self.register_buffer("cos_sin", table, persistent=False)
