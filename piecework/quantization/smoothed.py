"""A float checkpoint, some of whose norms have been divided by scales that went into the linears behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from piecework.weights.checkpoint import Checkpoint


class Smoothed:
    """`checkpoint`, with what `move` has changed."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.where = checkpoint.where
        self.config: dict[str, Any] = checkpoint.config
        self.generation_config: dict[str, Any] = checkpoint.generation_config
        self.moved: dict[str, Tensor] = {}
        """By norm, the scales [K] that its weight is divided by."""
        self._checkpoint = checkpoint
        self._norms: dict[str, Tensor] = {}
        self._columns: dict[str, Tensor] = {}

    def move(self, norm: str, linears: Sequence[str], s: Tensor) -> None:
        """Divide a norm's weight by s [K], and multiply the columns of all `linears` that read it.

        s is rounded so that the quotient has bfloat16's bits: nothing is lost where norms are stored so.
        """
        name = f"{norm}.weight"
        weight = read_float(self._checkpoint, name)
        rounded = (weight / s).bfloat16().float()
        s = torch.where(rounded != 0, weight / rounded, s)
        self.moved[norm] = s
        self._norms[name] = rounded
        self._columns.update({f"{linear}.weight": s for linear in linears})

    def names(self) -> list[str]:
        """As in the checkpoint."""
        return self._checkpoint.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """As in the checkpoint."""
        return self._checkpoint.shape(name)

    def close(self) -> None:
        """Close the checkpoint."""
        self._checkpoint.close()

    def read(self, name: str, out: Tensor) -> None:
        """Copy one weight into `out`; what is scaled is so in float32."""
        if name in self._norms:
            out.copy_(self._norms[name])
        elif name in self._columns:
            out.copy_(read_float(self._checkpoint, name).mul_(self._columns[name]))
        else:
            self._checkpoint.read(name, out)


def read_float(checkpoint: Checkpoint, name: str) -> Tensor:
    """Return one weight in float32."""
    weight = torch.empty(checkpoint.shape(name), dtype=torch.float32)
    checkpoint.read(name, weight)
    return weight
