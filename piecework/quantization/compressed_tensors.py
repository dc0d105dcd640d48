"""Reads the tensors of a compressed-tensors checkpoint: int8 weights, and four int8 in an int32.

Layouts: https://github.com/vllm-project/compressed-tensors, `int-quantized` and `pack-quantized`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from piecework.errors import ModelError
from piecework.layers.int8 import StaticInput
from piecework.quantization.groups import Group, read_groups
from piecework.quantization.reader import (
    Int8Shard,
    Scheme,
    main_scheme,
    read_bias,
    read_scale,
    read_static_input,
    refuse_offset,
    scheme_words,
)
from piecework.weights.load import Shapes
from piecework.weights.safetensors import SafetensorsCheckpoint

_ONE: Shapes = ((1,), (), (1, 1))
_PER_WORD = 4  # int8 values in an int32, the first in the lowest byte, each with 128 added


class CompressedTensorsReader:
    """The linears of a checkpoint whose config.json has a quantization_config of compressed-tensors."""

    def __init__(self, checkpoint: SafetensorsCheckpoint, config: Mapping[str, Any]) -> None:
        self._checkpoint = checkpoint
        self._groups = read_groups(config, checkpoint.where)
        self._offered = frozenset(checkpoint.names())
        self.scheme = main_scheme({group.scheme for group in self._groups.groups})
        self.description = f"a compressed-tensors checkpoint of {scheme_words(self.scheme)}"

    def scheme_of(self, linear: str) -> Scheme | None:
        """Return what the config says of a linear."""
        group = self._groups.find(linear)
        return group.scheme if group else None

    def tensors(self, linear: str, rows: int, inputs: int, bias: bool) -> Mapping[str, Shapes]:
        """Weight and scale, an input's scale, zero points as far as there are any, the bias."""
        group = self._group(linear)
        scale: Shapes = ((rows, 1), (rows,)) if group.per_channel else _ONE
        wanted: dict[str, Shapes] = {f"{linear}.weight_scale": scale}
        if group.packed:
            wanted[f"{linear}.weight_packed"] = ((rows, -(-inputs // _PER_WORD)),)
            wanted[f"{linear}.weight_shape"] = ((2,),)
        else:
            wanted[f"{linear}.weight"] = ((rows, inputs),)
        if f"{linear}.weight_zero_point" in self._offered:
            wanted[f"{linear}.weight_zero_point"] = scale
        if group.scheme == "w8a8-static":
            wanted[f"{linear}.input_scale"] = _ONE
            zero = f"{linear}.input_zero_point"
            if not group.input_symmetric or zero in self._offered:
                wanted[zero] = _ONE
        if bias:
            wanted[f"{linear}.bias"] = ((rows,),)
        return wanted

    def read(self, linear: str, weight: Tensor, bias: bool) -> Int8Shard:
        """Fill `weight` and return scales, offset and bias. Raises ModelError for values that can't be."""
        group, rows = self._group(linear), weight.shape[0]
        if group.packed:
            self._unpack(linear, weight)
        else:
            self._checkpoint.read(f"{linear}.weight", weight)
        if (zero := f"{linear}.weight_zero_point") in self._offered:
            refuse_offset(self._checkpoint, zero)
        static: StaticInput | None = None
        if group.scheme == "w8a8-static":
            offset = f"{linear}.input_zero_point"
            present = offset if offset in self._offered else None
            static = read_static_input(self._checkpoint, f"{linear}.input_scale", present)
        scale = read_scale(self._checkpoint, f"{linear}.weight_scale", weight)
        values = read_bias(self._checkpoint, f"{linear}.bias", rows, weight.device) if bias else None
        return Int8Shard(scale, values, static)

    def _unpack(self, linear: str, weight: Tensor) -> None:
        name = f"{linear}.weight_shape"
        shape = self._checkpoint.load(name).tolist()
        if shape != list(weight.shape):
            raise ModelError(f"{self._checkpoint.where}: {name} is {shape}, not {list(weight.shape)}")
        name = f"{linear}.weight_packed"
        words = torch.empty(self._checkpoint.shape(name), dtype=torch.int32)
        self._checkpoint.read(name, words)
        unpack(words, weight)

    def _group(self, linear: str) -> Group:
        group = self._groups.find(linear)
        assert group is not None, f"{linear} is not quantised"
        return group


def pack(weight: Tensor) -> Tensor:
    """Lay int8 [N, K] four to an int32 [N, ceil(K / 4)]: each with 128 added, the first one lowest."""
    missing = -weight.shape[1] % _PER_WORD
    codes = (weight.to(torch.int16) + 128).to(torch.uint8)
    return torch.nn.functional.pad(codes, (0, missing)).contiguous().view(torch.int32)


def unpack(words: Tensor, out: Tensor) -> None:
    """Undo `pack` into out [N, K] int8."""
    codes = words.contiguous().view(torch.uint8)[:, : out.shape[1]]
    # Adding 128 modulo 256 turns the highest bit, and so does taking it away.
    out.copy_((codes ^ 128).view(torch.int8))
