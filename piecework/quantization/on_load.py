"""Quantises the linears of a float checkpoint as they are read, one matrix at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from piecework.errors import ModelError
from piecework.layers.int8 import StaticInput
from piecework.quantization.numerics import quantise_rows_
from piecework.quantization.reader import HEAD, TIED_HEAD, Int8Shard, Scheme
from piecework.weights.checkpoint import Checkpoint
from piecework.weights.load import Shapes


class FloatReader:
    """Makes int8 of float weights: a symmetric scale per output channel, from the weight in float32.

    `inputs` holds, by linear, the calibrated ranges of those that are static; what has none is dynamic.
    The head, and an embedding that is tied to it, has a scheme of its own, `head`; None: it stays float.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        scheme: Scheme,
        *,
        inputs: Mapping[str, StaticInput] | None = None,
    ) -> None:
        self.description = f"float weights, quantised to {scheme} as they are read"
        self.checkpoint = checkpoint
        """Where the weights that stay float are, too."""
        self.scheme: Scheme = scheme
        self._excluded: set[str] = set()
        self._inputs = inputs or {}
        self.head: Scheme | None = None

    def exclude(self, linears: Collection[str]) -> None:
        """Leave these float."""
        self._excluded.update(linears)

    def scheme_of(self, linear: str) -> Scheme | None:
        """All linears are quantised but for those that were excluded, and the head by its own scheme."""
        if linear in (HEAD, TIED_HEAD):
            return self.head
        if linear in self._excluded:
            return None
        if self.scheme == "w8a8-static" and linear not in self._inputs:
            return "w8a8-dynamic"
        return self.scheme

    def tensors(self, linear: str, rows: int, inputs: int, bias: bool) -> Mapping[str, Shapes]:
        """Weight and bias, as in the float model."""
        wanted: dict[str, Shapes] = {f"{linear}.weight": ((rows, inputs),)}
        return wanted | ({f"{linear}.bias": ((rows,),)} if bias else {})

    def read(self, linear: str, weight: Tensor, bias: bool) -> Int8Shard:
        """Read the float weight, which lives only during this call, and quantise it into `weight`."""
        name = f"{linear}.weight"
        wide = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
        self.checkpoint.read(name, wide)
        try:
            scale = quantise_rows_(wide, weight)
        except ValueError as error:
            raise ModelError(f"{self.checkpoint.where}: {name} {error}, so it can't be quantised") from error
        values: Tensor | None = None
        if bias:
            values = torch.empty(weight.shape[0], device=weight.device)
            self.checkpoint.read(f"{linear}.bias", values)
        return Int8Shard(scale, values, self._inputs.get(linear))
