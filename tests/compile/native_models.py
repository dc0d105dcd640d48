"""Tiny models in every scheme that the CPU has kernels for, and their programs by two compilers."""

from __future__ import annotations

from functools import cache

import torch
from programs import MAX_POSITIONS, options, randomize
from tiny import tiny_config

from piecework.compilation import CompilationConfig
from piecework.config import EngineConfig
from piecework.graph.build import Options, build_program
from piecework.graph.passes.sets import default_fusions
from piecework.graph.passes.structure import Structure
from piecework.graph.program import Program
from piecework.layers.blocks import BlockEmbedding, BlockLinear
from piecework.layers.embedding import Embedding
from piecework.layers.int8 import StaticInput, W8A8Linear, W8Linear
from piecework.layers.linear import Linear
from piecework.models.build import build_model
from piecework.models.config import ModelConfig
from piecework.models.decoder import CausalLM
from piecework.ops.block_linear import BLOCK, GROUP, SIZES
from piecework.runner.recipe import make_passes

SCHEMES = ("float", "dynamic", "static", "offset", "w8", *SIZES)


def native_model(name: str, dtype: torch.dtype, scheme: str = "float") -> CausalLM:
    """A model of two layers with random weights, its linears of the scheme's kind."""
    overrides = {"num_hidden_layers": 2, "max_position_embeddings": MAX_POSITIONS}
    config = ModelConfig.from_dict(tiny_config(name, **overrides).to_dict())
    model = build_model(config, dtype=dtype, device="cpu", max_positions=MAX_POSITIONS)
    randomize(model)
    if scheme == "float":
        return model
    for path, module in list(model.model.named_modules()):
        parent, _, last = path.rpartition(".")
        made: torch.nn.Module | None = None
        if isinstance(module, Linear):
            made = _linear(module, scheme)
        elif isinstance(module, Embedding) and scheme in SIZES:
            packed = _packed(scheme, module.weight.shape)
            made = BlockEmbedding(packed, module.weight.shape[0], dtype)
        if made is not None:
            setattr(model.model.get_submodule(parent), last, made)
    return model


def _linear(linear: Linear, scheme: str) -> torch.nn.Module:
    sizes = getattr(linear, "sizes", ())
    outputs, dtype = linear.weight.shape[0], linear.weight.dtype
    if scheme in SIZES:
        return BlockLinear(_packed(scheme, linear.weight.shape), outputs, bias=linear.bias, sizes=sizes)
    scale = linear.weight.float().abs().amax(-1) / 127
    rounded = (linear.weight.float() / scale[:, None]).round().to(torch.int8)
    if scheme == "w8":
        return W8Linear(rounded, scale, dtype=dtype, bias=linear.bias, sizes=sizes)
    static = {"static": StaticInput(0.02), "offset": StaticInput(0.02, 3)}.get(scheme)
    quant_bias = (-3 * rounded.sum(-1)).to(torch.int32) if scheme == "offset" else None
    return W8A8Linear(
        rounded,
        scale * 0.02 if static else scale,
        dtype=dtype,
        bias=linear.bias,
        sizes=sizes,
        static=static,
        quant_bias=quant_bias,
    )


def _packed(kind: str, shape: torch.Size) -> torch.Tensor:
    """Random weights in blocks, of a size near those of a random model."""
    rows, inputs = shape
    blocks = (-(-rows // GROUP), inputs // BLOCK, SIZES[kind] * GROUP)
    packed = torch.randint(0, 256, blocks, dtype=torch.uint8)
    halves = 2 * GROUP if kind == "Q4_1" else GROUP
    largest = 127 if kind == "Q8_0" else 8
    scales = torch.rand(*blocks[:2], halves) * inputs**-0.5 / largest
    scales[..., GROUP:] *= -largest  # minimums
    packed[..., : 2 * halves] = scales.half().view(torch.uint8)
    return packed


def native_program(model: CausalLM, compiler: str, fused: bool = True, **settings: object) -> Program:
    """The program of a model's body with the passes of its kind, or without most fusions."""
    return build_program(model, native_options(model, compiler, fused, **settings))


def native_options(model: CausalLM, compiler: str, fused: bool = True, **settings: object) -> Options:
    """What the program is built with."""
    made = options(compiler, **settings)
    disabled = () if fused else sorted(default_fusions("cpu", model.dtype) - {"add_rms_norm"})
    config = EngineConfig(compilation_config=CompilationConfig(disable_passes=tuple(disabled)))
    made.passes = make_passes(config, made.device, model.config, model.dtype, Structure.read(model))
    return made


@cache
def both_programs(
    name: str, dtype: torch.dtype, scheme: str = "float", fused: bool = True
) -> tuple[CausalLM, Program, Program]:
    """A model, its program of eager pieces, and that of native ones."""
    model = native_model(name, dtype, scheme)
    return model, native_program(model, "eager", fused), native_program(model, "native", fused)
