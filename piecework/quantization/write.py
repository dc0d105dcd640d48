"""Writes a model with int8 linears as a compressed-tensors checkpoint.

Layouts: https://github.com/vllm-project/compressed-tensors, `int-quantized` (W8A8) and `pack-quantized`
(weight-only).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from piecework.models.decoder import CausalLM
from piecework.quantization.compressed_tensors import pack
from piecework.quantization.describe import quantization_config
from piecework.quantization.files import Shards
from piecework.quantization.on_load import FloatReader
from piecework.quantization.targets import Target
from piecework.weights.checkpoint import Checkpoint
from piecework.weights.folder import read_json
from piecework.weights.names import pieces_of
from piecework.weights.safetensors import SafetensorsCheckpoint


def write_checkpoint(
    folder: Path,
    model: CausalLM,
    checkpoint: Checkpoint,
    reader: FloatReader,
    targets: Sequence[Target],
    *,
    symmetric: bool = True,
    dtype: torch.dtype | None = None,
    step: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Write the weights and config.json of `model`, its targets as int8, reading each weight once.

    Args:
        model: only its structure counts; its parameters need no memory.
        checkpoint: what is quantised; its weights are read through `reader.checkpoint`.
        symmetric: no static input has an offset, so none is written.
        dtype: of the weights that stay float; None: as they are stored.
        step: called after each weight and each linear.

    Returns:
        The config that was written.
    """
    shards = Shards(folder)
    for name, tensor in _tensors(model, checkpoint, reader, targets, symmetric, dtype):
        shards.add(name, tensor)
        if name.endswith(("weight", "weight_packed")):
            step()
    shards.finish()
    config = _raw_config(checkpoint)
    config["quantization_config"] = quantization_config(model, targets, symmetric=symmetric)
    if dtype is not None:
        config["torch_dtype"] = config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return config


def _tensors(
    model: CausalLM,
    checkpoint: Checkpoint,
    reader: FloatReader,
    targets: Sequence[Target],
    symmetric: bool,
    dtype: torch.dtype | None,
) -> Iterator[tuple[str, Tensor]]:
    offered = set(checkpoint.names())
    own = {f"{target.name}.{kind}" for target in targets for kind in ("weight", "bias")}
    for name, parameter in model.named_parameters():
        if name in own:
            continue
        sizes: Any = getattr(model.get_submodule(name.rpartition(".")[0]), "sizes", None)
        for piece in pieces_of(name, parameter.shape, model.packed_modules, sizes, offered.__contains__):
            whole = parameter if piece.expert is None else parameter[piece.expert]
            shape = (piece.count, *whole.shape[1:])
            yield (
                piece.name,
                _read(reader.checkpoint, piece.name, shape, dtype or _stored(checkpoint, piece.name)),
            )
    for target in targets:
        for part in target.parts:
            weight = torch.empty(part.count, target.module.weight.shape[1], dtype=torch.int8)
            shard = reader.read(part.linear, weight, target.bias)
            if target.scheme == "w8":
                yield f"{part.linear}.weight_packed", pack(weight)
                yield f"{part.linear}.weight_shape", torch.tensor(weight.shape)
            else:
                yield f"{part.linear}.weight", weight
            yield f"{part.linear}.weight_scale", shard.scale[:, None]
            if shard.static is not None:
                yield f"{part.linear}.input_scale", torch.tensor([shard.static.scale])
                if not symmetric:
                    zero = torch.tensor([shard.static.offset], dtype=torch.int8)
                    yield f"{part.linear}.input_zero_point", zero
            if target.bias:
                name = f"{part.linear}.bias"
                stored = dtype or _stored(checkpoint, name)
                yield name, _read(reader.checkpoint, name, (part.count,), stored)


def _stored(checkpoint: Checkpoint, name: str) -> torch.dtype:
    return checkpoint.dtype(name) if isinstance(checkpoint, SafetensorsCheckpoint) else torch.float32


def _read(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    out = torch.empty(shape, dtype=dtype)
    checkpoint.read(name, out)
    return out


def _raw_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The config.json as it is, without what was filled in; of another source, what stands for it."""
    if isinstance(checkpoint, SafetensorsCheckpoint):
        return read_json(Path(checkpoint.where) / "config.json")
    return {name: value for name, value in checkpoint.config.items() if value is not None}
