"""Runs a float model over texts and finds the range of every linear's input, and what int8 would cost."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from piecework.errors import ConfigError, ModelError
from piecework.layers.int8 import StaticInput
from piecework.models.decoder import CausalLM
from piecework.quantization.numerics import INT8_MAX, INT8_MIN, static_input


@dataclass
class Observed:
    """The least and largest input of each token that one linear has seen."""

    low: list[Tensor] = field(default_factory=list)
    high: list[Tensor] = field(default_factory=list)

    def add(self, x: Tensor) -> None:
        """Take the tokens of x [T, K]."""
        low, high = x.aminmax(dim=-1)
        self.low.append(low)
        self.high.append(high)

    def range(self, percentile: float) -> tuple[float, float]:
        """Return the range that holds this share of the tokens' own ranges; 100 is that of all."""
        share = percentile / 100
        low = torch.cat(self.low).float().quantile(1 - share)
        high = torch.cat(self.high).float().quantile(share)
        return float(low), float(high)


@dataclass
class Error:
    """The mean over tokens of the relative error that quantising a linear's input makes."""

    static: StaticInput
    total: float = 0.0
    tokens: int = 0

    def add(self, x: Tensor) -> None:
        """Take the tokens of x [T, K]: |x - q(x)| / |x| of each."""
        scale, offset = self.static.scale, self.static.offset
        codes = (x.float() / scale + offset).round().clamp(INT8_MIN, INT8_MAX)
        lost = (x - (codes - offset) * scale).norm(dim=-1)
        size = x.float().norm(dim=-1)
        self.total += float((lost / size.clamp_min(1e-30)).sum())
        self.tokens += x.shape[0]

    @property
    def mean(self) -> float:
        """Mean relative error of a token."""
        return self.total / max(self.tokens, 1)


@dataclass(frozen=True)
class Calibration:
    """By linear of the model: how its input is quantised, and the mean relative error of a token then."""

    inputs: Mapping[str, StaticInput]
    errors: Mapping[str, float]
    tokens: int


def calibrate(
    model: CausalLM,
    samples: Sequence[Sequence[int]],
    linears: Collection[str],
    *,
    percentile: float = 100.0,
    symmetric: bool = True,
    step: Callable[[], None] = lambda: None,
) -> Calibration:
    """Run `samples` (token ids, each a sequence of its own) through `model` twice: ranges, then errors.

    Args:
        linears: names of the model's linears to look at.
        percentile: of the tokens' ranges that a linear's range holds; what lies outside is clamped.
        step: called after each sample, 2 * len(samples) times.

    Raises:
        ModelError: an input isn't finite.
    """
    observed = {name: Observed() for name in linears}
    run_samples(model, samples, {name: one.add for name, one in observed.items()}, step)
    inputs: dict[str, StaticInput] = {}
    for name, one in observed.items():
        low, high = one.range(percentile)
        try:
            inputs[name] = static_input(low, high, symmetric=symmetric)
        except ValueError as error:
            raise ModelError(f"the input of {name} can't be calibrated: {error}") from error
    errors = {name: Error(static) for name, static in inputs.items()}
    run_samples(model, samples, {name: one.add for name, one in errors.items()}, step)
    means = {name: one.mean for name, one in errors.items()}
    return Calibration(inputs, means, sum(map(len, samples)))


@torch.inference_mode()
def run_samples(
    model: CausalLM,
    samples: Sequence[Sequence[int]],
    takers: Mapping[str, Callable[[Tensor], None]],
    step: Callable[[], None],
) -> None:
    """Run each of `samples` (token ids) by itself, and give every input [T, K] of a linear to its taker."""
    device = next(model.parameters()).device
    model.bind_attention(None)  # a sample is one causal sequence, which needs no cache
    with _hooks(model, takers):
        for ids in samples:
            tokens = torch.tensor(ids, device=device)
            model(tokens, torch.arange(len(ids), device=device))
            step()


@contextmanager
def _hooks(model: nn.Module, takers: Mapping[str, Callable[[Tensor], None]]) -> Iterator[None]:
    def hook_of(take: Callable[[Tensor], None]) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            take(inputs[0])

        return hook

    handles = [
        model.get_submodule(name).register_forward_pre_hook(hook_of(take)) for name, take in takers.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def cut_samples(
    encoded: Sequence[Sequence[int]], *, count: int, max_tokens: int, vocab_size: int
) -> list[list[int]]:
    """Take the first `count` texts with a token or more, each cut to `max_tokens`."""
    samples = [list(ids[:max_tokens]) for ids in encoded if ids][:count]
    if not samples:
        raise ConfigError("calibration", "", "texts that give at least one token")
    if max(max(ids) for ids in samples) >= vocab_size:
        raise ModelError(f"the tokenizer gives ids that the model's vocabulary of {vocab_size} lacks")
    return samples
