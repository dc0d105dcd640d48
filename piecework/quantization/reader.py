"""What a source of int8 weights offers to the loader, whatever format they are kept in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from piecework.errors import ModelError
from piecework.layers.int8 import StaticInput
from piecework.weights.load import Shapes
from piecework.weights.safetensors import SafetensorsCheckpoint

Scheme = Literal["w8a8-dynamic", "w8a8-static", "w8"]
HEAD, TIED_HEAD = "lm_head", "model.embed_tokens"
"""The head's name, and that of what is the head where both are one matrix."""
SCHEMES: tuple[Scheme, ...] = ("w8a8-dynamic", "w8a8-static", "w8")


@dataclass(frozen=True)
class Folded:
    """What ModelSlim keeps of a static layer: quant_bias [n] int32 with the bias in it, deq_scale [n]."""

    quant_bias: Tensor
    deq_scale: Tensor


@dataclass(frozen=True)
class Int8Shard:
    """One linear of a checkpoint, but for its weight: float32 scale [n], bias [n], how its input comes."""

    scale: Tensor
    bias: Tensor | None = None
    static: StaticInput | None = None
    folded: Folded | None = None


class Reader(Protocol):
    """Reads the linears of one checkpoint by their names there (`model.layers.0.mlp.up_proj`)."""

    description: str
    """The format and scheme, for messages."""

    def scheme_of(self, linear: str) -> Scheme | None:
        """Say how a linear is quantised; None: not at all."""
        ...

    def tensors(self, linear: str, rows: int, inputs: int, bias: bool) -> Mapping[str, Shapes]:
        """Name what `read` takes of the checkpoint, each with the shapes that it may have."""
        ...

    def read(self, linear: str, weight: Tensor, bias: bool) -> Int8Shard:
        """Fill `weight` [rows, inputs] int8, and return the rest on its device."""
        ...


def main_scheme(schemes: set[Scheme]) -> Scheme | None:
    """Name a checkpoint by its schemes: a static one may have linears that stay dynamic."""
    order: tuple[Scheme, ...] = ("w8a8-static", "w8a8-dynamic", "w8")
    return next((scheme for scheme in order if scheme in schemes), None)


def scheme_words(scheme: Scheme | None) -> str:
    """Name a checkpoint's scheme for messages."""
    return f"scheme {scheme}" if scheme else "a quantisation that leaves all linears float"


def read_scale(checkpoint: SafetensorsCheckpoint, name: str, weight: Tensor) -> Tensor:
    """Read the scale of weight [N, K] as float32 [N] on its device, one for all being repeated.

    Raises ModelError where it is no scale.
    """
    scale = _load_scale(checkpoint, name).flatten()
    check_scale(checkpoint, name, scale, weight)
    return scale.expand(weight.shape[0]).contiguous().to(weight.device)


def check_scale(checkpoint: SafetensorsCheckpoint, name: str, scale: Tensor, weight: Tensor) -> None:
    """Refuse a scale [N] or [1] that can't be that of weight [N, K]; 0 may be that of a row of zeros."""
    if not bool((scale.isfinite() & (scale >= 0)).all()):
        raise ModelError(f"{checkpoint.where}: {name} holds a scale that is negative or not finite")
    if not bool(scale.all()) and bool(weight[scale.to(weight.device).expand(weight.shape[0]) == 0].any()):
        raise ModelError(f"{checkpoint.where}: {name} is 0 for weights that are not 0")


def read_static_input(checkpoint: SafetensorsCheckpoint, scale: str, offset: str | None) -> StaticInput:
    """Read the scale and, where there is one, the offset of an input; ModelError where they can't be."""
    step = float(_load_scale(checkpoint, scale))
    if not (step >= torch.finfo(torch.float32).tiny and step < float("inf")):  # below, 1 / step overflows
        raise ModelError(f"{checkpoint.where}: {scale} is {step}; it has to be positive and finite")
    shift = 0.0 if offset is None else float(checkpoint.load(offset).float())
    if not (-128 <= shift <= 127 and shift.is_integer()):
        raise ModelError(f"{checkpoint.where}: {offset} is {shift}; it has to be a whole number in int8")
    return StaticInput(step, int(shift))


def _load_scale(checkpoint: SafetensorsCheckpoint, name: str) -> Tensor:
    scale = checkpoint.load(name)
    if not scale.is_floating_point():
        dtype = str(scale.dtype).removeprefix("torch.")
        raise ModelError(f"{checkpoint.where}: {name} is {dtype}; a scale is a floating-point number")
    return scale.float()


def refuse_offset(checkpoint: SafetensorsCheckpoint, name: str) -> None:
    """Refuse weights whose zero is not at 0: the int8 product knows none."""
    if bool(checkpoint.load(name).count_nonzero()):
        raise ModelError(f"{checkpoint.where}: {name} is not zero; only symmetric int8 weights are supported")


def read_bias(checkpoint: SafetensorsCheckpoint, name: str, rows: int, device: torch.device) -> Tensor:
    """Read a bias as float32 [rows]."""
    bias = torch.empty(rows, device=device)
    checkpoint.read(name, bias)
    return bias
