"""Gives a quantised checkpoint's other matrices back as float: experts and embeddings have no int8 op."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from piecework.errors import ModelError
from piecework.quantization.reader import Reader
from piecework.weights.checkpoint import Checkpoint

_SCALE = ".weight_scale"
_OWN = (
    "weight",
    "weight_packed",
    "weight_shape",
    "weight_scale",
    "weight_offset",
    "weight_zero_point",
    "input_scale",
    "input_offset",
    "input_zero_point",
    "quant_bias",
    "deq_scale",
)


class Dequantised:
    """A checkpoint in which the quantised matrices that are not `taken` are float weights.

    Names below `taken` are left as they are, for whoever reads those.
    """

    def __init__(self, checkpoint: Checkpoint, reader: Reader, taken: Collection[str]) -> None:
        self._checkpoint, self._reader = checkpoint, reader
        self.where = checkpoint.where
        self.config: dict[str, Any] = checkpoint.config
        self.generation_config: dict[str, Any] = checkpoint.generation_config
        offered = checkpoint.names()
        self._offered = frozenset(offered)
        stems = {name.removesuffix(_SCALE) for name in offered if name.endswith(_SCALE)}
        self.linears = sorted(stem for stem in stems - set(taken) if reader.scheme_of(stem) is not None)
        hidden = {f"{stem}.{own}" for stem in self.linears for own in _OWN}
        self._weights = {f"{stem}.weight": stem for stem in self.linears}
        self._names = [name for name in offered if name not in hidden] + list(self._weights)

    def names(self) -> list[str]:
        """The names without those that belong to a matrix's quantisation."""
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a weight."""
        stem = self._weights.get(name)
        if stem is None:
            return self._checkpoint.shape(name)
        try:
            return self._checkpoint.shape(name)
        except ModelError:
            if f"{stem}.weight_shape" not in self._offered:
                raise
            shape = torch.empty(2, dtype=torch.int64)
            self._checkpoint.read(f"{stem}.weight_shape", shape)
            return tuple(shape.tolist())

    def read(self, name: str, out: Tensor) -> None:
        """Copy a weight, or int8 times its scale, into `out`."""
        stem = self._weights.get(name)
        if stem is None:
            self._checkpoint.read(name, out)
            return
        wanted = self._reader.tensors(stem, out.shape[0], out.shape[1], False)
        for part, shapes in wanted.items():
            if self._checkpoint.shape(part) not in shapes:
                raise ModelError(f"{self.where}: {part} has shape {list(self._checkpoint.shape(part))}")
        weight = torch.empty(out.shape, dtype=torch.int8, device=out.device)
        scale = self._reader.read(stem, weight, False).scale
        out.copy_(weight * scale[:, None])

    def close(self) -> None:
        """Close the checkpoint."""
        self._checkpoint.close()
