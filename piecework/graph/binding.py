"""What a program's places for tensors from outside stand for, and how many tokens it may be run with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

MAX_TOKENS = 1 << 16
"""Largest token count that a program is made for, where nobody says otherwise."""


@dataclass(frozen=True)
class Binding:
    """What a placeholder of a graph stands for: an input by its name, or a weight, bound by reference."""

    kind: Literal["input", "weight"]
    name: str
    tensor: Tensor | None = None
