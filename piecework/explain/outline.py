"""A model as it would be loaded, without its weights: float linears, or int8 ones in their places."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from piecework.config import LoadConfig
from piecework.layers.coded import code_layer
from piecework.layers.embedding import Embedding
from piecework.layers.int8 import Int8Embedding, Int8Linear, StaticInput, W8A8Linear, W8Linear
from piecework.models.build import build_model
from piecework.models.config import ModelConfig
from piecework.models.decoder import CausalLM
from piecework.ops.coded_linear import coded_size
from piecework.quantization.choose import choose_reader
from piecework.quantization.in_blocks import load_in_blocks
from piecework.quantization.load import int8_targets
from piecework.quantization.modelslim import description_of
from piecework.quantization.targets import Target
from piecework.weights.checkpoint import Checkpoint
from piecework.weights.gguf.checkpoint import GgufCheckpoint
from piecework.weights.load import open_checkpoint
from piecework.weights.source import Source


def open_outline(source: Source, options: LoadConfig) -> Checkpoint:
    """Open as much of a checkpoint as says what the model is: a quantised one lists its tensors."""
    plain = open_checkpoint(source, "dummy", options.seed, cache_dir=options.cache_dir)
    if options.load_format == "dummy":
        return plain
    says_so = any(plain.config.get(key) for key in ("quantization_config", "compression_config"))
    path = Path(source.path)
    in_blocks = options.quantization in ("auto", "gguf") and path.suffix == ".gguf"
    if says_so or in_blocks or (path.is_dir() and description_of(path) is not None):
        return open_checkpoint(source, options.load_format, options.seed, cache_dir=options.cache_dir)
    return plain


def outline(
    config: ModelConfig,
    checkpoint: Checkpoint,
    quantization: str,
    lm_head: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int,
    repacked: bool = False,
) -> CausalLM:
    """Build the model of `config` with uninitialised weights, in the forms that loading gives them.

    They are int8 where the settings make them so; `repacked` is as in `load_model`.

    Raises:
        ModelError, ConfigError: as when the weights are loaded.
    """
    reader = choose_reader(checkpoint, quantization, lm_head)
    if isinstance(reader, GgufCheckpoint):
        # What its blocks become depends on them, so they are read.
        return load_in_blocks(
            config, reader, dtype=dtype, device=device, max_positions=max_positions, repacked=repacked
        )
    model = build_model(config, dtype=dtype, device=device, max_positions=max_positions)
    if reader is not None:
        for target in int8_targets(model, checkpoint, reader):
            model.set_submodule(target.name, _empty(target, dtype).eval())
    if repacked:
        _repack(model)
    return model


def _repack(model: CausalLM) -> None:
    """Give uninitialised weights the form in which they are laid out when they are loaded."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Int8Linear | Int8Embedding):
            module.lay_out()
        code_layer(model, name, lambda weight: weight.new_empty(coded_size(*weight.shape), dtype=torch.uint8))


def _empty(target: Target, dtype: torch.dtype) -> nn.Module:
    weight = torch.empty_like(target.module.weight, dtype=torch.int8)
    scale = weight.new_empty(weight.shape[0], dtype=torch.float32)
    if isinstance(target.module, Embedding):
        return Int8Embedding(weight, scale, dtype=dtype, weight_only=target.scheme == "w8")
    bias, sizes = target.module.bias, getattr(target.module, "sizes", ())
    if target.scheme == "w8":
        return W8Linear(weight, scale, dtype=dtype, bias=bias, sizes=sizes)
    static = StaticInput(1.0) if target.scheme == "w8a8-static" else None
    return W8A8Linear(weight, scale, dtype=dtype, bias=bias, sizes=sizes, static=static)
