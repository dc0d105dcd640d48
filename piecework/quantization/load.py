"""Makes a model and fills it, with int8 linears where a reader has them."""

from __future__ import annotations

import logging
import os
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from piecework.allocator import give_back_freed
from piecework.layers.int8 import Int8Embedding, Int8Linear
from piecework.layers.parameter import deferred_parameters
from piecework.models.build import build_model
from piecework.models.config import ModelConfig
from piecework.models.decoder import CausalLM
from piecework.quantization.assemble import read_target
from piecework.quantization.dequantise import Dequantised
from piecework.quantization.floats import load_floats
from piecework.quantization.in_blocks import load_in_blocks
from piecework.quantization.on_load import FloatReader
from piecework.quantization.reader import Reader
from piecework.quantization.targets import Target, find_targets, kept_float, tied_head
from piecework.weights.checkpoint import Checkpoint
from piecework.weights.gguf.checkpoint import GgufCheckpoint
from piecework.weights.load import THREADS, Shapes
from piecework.weights.sharded import ShardedCheckpoint

log = logging.getLogger("piecework.load")


def int8_targets(model: CausalLM, checkpoint: Checkpoint, reader: Reader) -> list[Target]:
    """List the layers of a float model that become int8. Raises ModelError as `find_targets` does."""
    if isinstance(reader, FloatReader):
        reader.exclude(kept_float(model))
    offered = set(checkpoint.names())
    found = find_targets(
        model, reader, lambda name: name in offered or f"{name}_packed" in offered, checkpoint.where
    )
    if isinstance(reader, FloatReader) and model.lm_head is None:
        found += tied_head(model, reader)
    return found


def load_model(
    config: ModelConfig,
    checkpoint: Checkpoint,
    reader: Reader | GgufCheckpoint | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int,
    repacked: bool = False,
) -> CausalLM:
    """Build the model of `config` and fill it from `checkpoint`; `reader` None: all of it is float.

    `repacked`: matrices in bfloat16 are coded (layers/coded.py) and those in int8 laid out in panels, on the
    CPU. A float matrix that becomes int8 or coded is in memory only while it is read. Raises ModelError with
    all names that are missing, unexpected or of another shape.
    """
    if isinstance(reader, GgufCheckpoint | ShardedCheckpoint):
        # A rank's share offers the same.
        return load_in_blocks(
            config, reader, dtype=dtype, device=device, max_positions=max_positions, repacked=repacked
        )
    with deferred_parameters():
        model = build_model(config, dtype=dtype, device=device, max_positions=max_positions)
    if reader is None:
        load_floats(model, checkpoint, device, repacked=repacked)
        return model
    targets = int8_targets(model, checkpoint, reader)
    taken: dict[str, Shapes] = {}
    for target in targets:
        model.set_submodule(target.name, nn.Module())  # a place without weights, until the layer is read
        inputs = target.module.weight.shape[1]
        for part in target.parts:
            taken.update(reader.tensors(part.linear, part.count, inputs, target.bias))
    rest = checkpoint
    if not isinstance(reader, FloatReader):
        rest = Dequantised(checkpoint, reader, {part.linear for target in targets for part in target.parts})
        if rest.linears:
            log.info("%s: %d matrices have no int8 op and are made float", rest.where, len(rest.linears))
    load_floats(model, rest, device, taken, repacked=repacked)

    def read(target: Target) -> Int8Linear | Int8Embedding:
        layer = read_target(target, reader, dtype=dtype, device=device)
        if repacked:
            layer.lay_out()
            give_back_freed()  # the allocator would keep what lies between them
        return layer

    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        for target, layer in zip(targets, pool.map(read, targets), strict=True):
            model.set_submodule(target.name, layer.eval())
    log.info("%s: %s; %d layers are int8", checkpoint.where, reader.description, len(targets))
    return model
