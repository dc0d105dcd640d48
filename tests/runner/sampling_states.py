"""Short ways to write sampling states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from piecework.runner.sampler import SamplingState, sample
from piecework.sampling import SamplingParams


def state(
    seed: int = 0,
    index: int = 0,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    banned: tuple[int, ...] = (),
    **params: Any,
) -> SamplingState:
    """A state with these sampling parameters."""
    return SamplingState(SamplingParams(**params), seed, index, prompt, output, banned)


def draws(logits: Tensor, count: int, **params: Any) -> Tensor:
    """Tokens [count] drawn from one row of logits [V], each with a seed of its own."""
    settings = SamplingParams(**params)
    states = [SamplingState(settings, seed, 3, (), ()) for seed in range(count)]
    return torch.tensor(sample(logits.expand(count, -1), states).token_ids)


def peaked(rows: int, size: int, seed: int = 0) -> Tensor:
    """Logits [rows,size] whose probabilities fall off as those of language models do."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, size, generator=generator) * 3
