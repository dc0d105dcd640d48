"""Reads checkpoints that Huawei's ModelSlim writes for Ascend.

`quant_model_description*.json` gives a type to every tensor. Tensors and types as vllm-ascend's
`quantization/methods/w8a8_static.py`, `w8a8_dynamic.py` and `w8a16.py` read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from piecework.errors import ModelError
from piecework.quantization.reader import (
    Folded,
    Int8Shard,
    Scheme,
    check_scale,
    main_scheme,
    read_bias,
    read_scale,
    read_static_input,
    refuse_offset,
    scheme_words,
)
from piecework.weights.folder import read_json
from piecework.weights.load import Shapes
from piecework.weights.safetensors import SafetensorsCheckpoint

DESCRIPTION = "quant_model_description*.json"
_FLOAT = "FLOAT"
_SCHEMES: dict[str, Scheme] = {"W8A8": "w8a8-static", "W8A8_DYNAMIC": "w8a8-dynamic", "W8A16": "w8"}


def description_of(folder: Path) -> Path | None:
    """Return the file that describes a folder's quantisation; None: it isn't ModelSlim's."""
    found = sorted(folder.glob(DESCRIPTION))
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise ModelError(f"{folder}: has several descriptions of a quantisation, keep one: {names}")
    return found[0] if found else None


class ModelSlimReader:
    """The linears of a checkpoint with a quant_model_description.json."""

    def __init__(self, checkpoint: SafetensorsCheckpoint, description: Path) -> None:
        self._checkpoint = checkpoint
        self._offered = frozenset(checkpoint.names())
        self._schemes = _read_description(description)
        self.scheme = main_scheme({scheme for scheme in self._schemes.values() if scheme})
        self.description = f"a ModelSlim checkpoint of {scheme_words(self.scheme)}"

    def scheme_of(self, linear: str) -> Scheme | None:
        """Return what the description says of a linear's weight."""
        return self._schemes.get(linear)

    def tensors(self, linear: str, rows: int, inputs: int, bias: bool) -> Mapping[str, Shapes]:
        """Weight, scales and offsets, quant_bias and deq_scale where static; the bias where it is not."""
        channels: Shapes = ((rows, 1), (rows,))
        wanted: dict[str, Shapes] = {
            f"{linear}.weight": ((rows, inputs),),
            f"{linear}.weight_scale": channels,
        }
        if (offset := f"{linear}.weight_offset") in self._offered:
            wanted[offset] = channels
        static = self._schemes[linear] == "w8a8-static"
        if static:
            wanted[f"{linear}.input_scale"] = wanted[f"{linear}.input_offset"] = ((1,), ())
            wanted[f"{linear}.quant_bias"] = wanted[f"{linear}.deq_scale"] = ((rows,),)
        # quant_bias holds a static layer's bias; the float one may still lie beside it. Elsewhere one that
        # the model has no place for would be lost, and with it what the checkpoint computes.
        if f"{linear}.bias" in self._offered if static else bias:
            wanted[f"{linear}.bias"] = ((rows,),)
        return wanted

    def read(self, linear: str, weight: Tensor, bias: bool) -> Int8Shard:
        """Fill `weight` and return the rest. Raises ModelError for values that can't be."""
        rows, device = weight.shape[0], weight.device
        self._checkpoint.read(f"{linear}.weight", weight)
        if (offset := f"{linear}.weight_offset") in self._offered:
            refuse_offset(self._checkpoint, offset)
        scale = read_scale(self._checkpoint, f"{linear}.weight_scale", weight)
        if self._schemes[linear] != "w8a8-static":
            values = read_bias(self._checkpoint, f"{linear}.bias", rows, device) if bias else None
            return Int8Shard(scale, values)
        static = read_static_input(self._checkpoint, f"{linear}.input_scale", f"{linear}.input_offset")
        quant_bias = torch.empty(rows, dtype=torch.int32, device=device)
        self._checkpoint.read(f"{linear}.quant_bias", quant_bias)
        folded = Folded(quant_bias, self._deq_scale(f"{linear}.deq_scale", weight))
        return Int8Shard(scale, None, static, folded)

    def _deq_scale(self, name: str, weight: Tensor) -> Tensor:
        """float32, or for float16 models the float32's bits in an int64."""
        scale = self._checkpoint.load(name)
        if scale.dtype == torch.int64:
            bits = scale.to(torch.int32)
            if not torch.equal(bits.long(), scale):
                raise ModelError(f"{self._checkpoint.where}: {name} holds more than the bits of a float32")
            scale = bits.view(torch.float32)
        elif not scale.is_floating_point():
            dtype = str(scale.dtype).removeprefix("torch.")
            raise ModelError(f"{self._checkpoint.where}: {name} is {dtype}, not float32 or its bits in int64")
        scale = scale.float()
        check_scale(self._checkpoint, name, scale, weight)
        return scale.to(weight.device)


def _read_description(path: Path) -> dict[str, Scheme | None]:
    """The scheme of each linear: entries of `<linear>.weight`; others repeat it or describe the tool."""
    found: dict[str, Scheme | None] = {}
    for name, kind in read_json(path).items():
        if not name.endswith(".weight"):
            continue
        if kind not in (_FLOAT, *_SCHEMES):
            known = ", ".join((*_SCHEMES, _FLOAT))
            raise ModelError(f"{path}: {name} is of type {kind!r}, which is not supported: one of {known}")
        found[name.removesuffix(".weight")] = _SCHEMES.get(kind)
    return found
