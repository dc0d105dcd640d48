"""Seeded random weights for a configuration: for tests and benchmarks that need no real model."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

STEP = 2**20  # weights in one step


class DummyCheckpoint:
    """Has a weight of every name and shape that it is asked for, so `names` lists none.

    A weight is a function of the seed and its name, whatever else is read and in which order. Matrices
    are normal with a standard deviation of 1 / sqrt(inputs), so that activations neither vanish nor
    explode; norms are near 1, biases near 0.
    """

    def __init__(
        self, config: dict[str, Any], generation_config: dict[str, Any], seed: int, where: str
    ) -> None:
        self.config = config
        self.generation_config = generation_config
        self.seed = seed
        self.where = where

    def names(self) -> list[str]:
        """Nothing: any name can be read."""
        return []

    def shape(self, name: str) -> tuple[int, ...]:
        """Not known: a weight takes the shape of the tensor that it is read into."""
        raise KeyError(f"a dummy checkpoint has {name} in any shape")

    def read(self, name: str, out: Tensor) -> None:
        """Fill `out` with the weight of this name; the same numbers on every device, cast to its dtype."""
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") % 2**63)
        mean, deviation = _distribution(name, tuple(out.shape))
        flat = out.view(-1)
        for first in range(0, flat.numel(), STEP):
            part = flat[first : first + STEP]
            part.copy_(torch.empty(part.shape).normal_(mean, deviation, generator=generator))

    def close(self) -> None:
        """Nothing is open."""


def _distribution(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and standard deviation."""
    if len(shape) > 1:
        return 0.0, shape[-1] ** -0.5
    return (0.0 if name.endswith("bias") else 1.0), 0.02
