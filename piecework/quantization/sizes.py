"""How many bytes a model's weights will take, from the headers of its files alone."""

from __future__ import annotations

import torch

from piecework.layers.coded import matrix_to_code
from piecework.layers.embedding import Embedding
from piecework.layers.int8 import Int8Embedding, Int8Linear, StaticInput, W8A8Linear, W8Linear
from piecework.layers.parameter import deferred_parameters
from piecework.models.build import build_model
from piecework.models.config import ModelConfig
from piecework.models.decoder import CausalLM
from piecework.ops.coded_linear import coded_size
from piecework.quantization.in_blocks import block_matrices
from piecework.quantization.load import int8_targets
from piecework.quantization.reader import Reader
from piecework.quantization.targets import Target
from piecework.weights.checkpoint import Checkpoint
from piecework.weights.gguf.checkpoint import GgufCheckpoint


def float_outline(config: ModelConfig, dtype: torch.dtype) -> CausalLM:
    """Build the float model of `config` without memory for its parameters, and for one position."""
    with deferred_parameters():
        return build_model(config, dtype=dtype, device=torch.device("cpu"), max_positions=1)


def weight_bytes(
    model: CausalLM, checkpoint: Checkpoint, reader: Reader | GgufCheckpoint | None, *, repacked: bool = False
) -> int:
    """Return the bytes of all parameters that `load_model` gives a model with this float outline.

    It decides by the same functions which layers are int8, stay in blocks or are laid out anew. Raises
    ModelError where these do. An int8 layer that may need a correction for its input's offset is counted
    with it, and one in bfloat16 as if it can be coded.
    """
    own = {id(p): p.nbytes for p in model.parameters()}
    if repacked:
        matrices = [w for w in map(matrix_to_code, model.modules()) if w is not None]
        own.update({id(weight): coded_size(*weight.shape) for weight in matrices})
    replaced: dict[int, int] = {}
    if isinstance(reader, GgufCheckpoint):
        for name, matrix in block_matrices(model, reader).items():
            weight = model.get_parameter(f"{name}.weight")
            replaced[id(weight)] = matrix.nbytes
    elif reader is not None:
        for target in int8_targets(model, checkpoint, reader):
            layer = _int8_layer(target, reader, model.dtype)
            if repacked:
                layer.lay_out()
            replaced.update({id(p): 0 for p in target.module.parameters()})
            replaced[id(target.module.weight)] = sum(p.nbytes for p in layer.parameters())
    return sum((own | replaced).values())


def _int8_layer(target: Target, reader: Reader, dtype: torch.dtype) -> Int8Linear | Int8Embedding:
    """The layer that takes a target's place, without memory for its parameters."""
    rows, inputs = target.module.weight.shape
    names = {
        name.rpartition(".")[2]
        for part in target.parts
        for name in reader.tensors(part.linear, part.count, inputs, target.bias)
    }
    with torch.device("meta"):
        weight, scale = torch.empty(rows, inputs, dtype=torch.int8), torch.empty(rows)
        bias = torch.empty(rows, dtype=dtype) if target.bias and "quant_bias" not in names else None
        if isinstance(target.module, Embedding):
            return Int8Embedding(weight, scale, dtype=dtype, weight_only=target.scheme == "w8")
        if target.scheme == "w8":
            return W8Linear(weight, scale, dtype=dtype, bias=bias)
        if target.scheme == "w8a8-dynamic":
            return W8A8Linear(weight, scale, dtype=dtype, bias=bias)
        offset = bool(names & {"input_offset", "input_zero_point"})
        summed = torch.empty(rows, dtype=torch.int32) if offset else None
        static = StaticInput(1.0, int(offset))
        return W8A8Linear(weight, scale, dtype=dtype, bias=bias, static=static, quant_bias=summed)
