"""Tiny models in every scheme that the CPU has kernels for, and their programs by two compilers."""

from __future__ import annotations

from collections.abc import Sequence
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
from piecework.layers.blocks import BlockEmbedding, BlockLinear, MixedBlockLinear
from piecework.layers.embedding import Embedding
from piecework.layers.int8 import StaticInput, W8A8Linear, W8Linear
from piecework.layers.linear import Linear
from piecework.models.build import build_model
from piecework.models.config import ModelConfig
from piecework.models.decoder import CausalLM
from piecework.ops.block_kinds import GROUP, KINDS
from piecework.runner.recipe import make_passes

SCHEMES = ("float", "dynamic", "static", "offset", "w8", *KINDS, "Q4_K+Q6_K")


def pairwise(names: Sequence[str]) -> list[tuple[str, str, torch.dtype]]:
    """Schemes, models of these names and types, each one of them with each of every other."""
    types = (torch.float32, torch.bfloat16, torch.float16)
    return [
        (scheme, name, types[(i + j) % len(types)])
        for i, scheme in enumerate(SCHEMES)
        for j, name in enumerate(names)
    ]


def native_model(name: str, dtype: torch.dtype, scheme: str = "float") -> CausalLM:
    """A model of two layers with random weights, its linears of the scheme's kind."""
    overrides = {"num_hidden_layers": 2, "max_position_embeddings": MAX_POSITIONS}
    if any(KINDS[kind].channels == 256 for kind in _kinds(scheme)):
        overrides |= {"hidden_size": 256, "intermediate_size": 512}
        overrides |= {"head_dim": 64} if name == "qwen3" else {}
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
        elif isinstance(module, Embedding) and _kinds(scheme):
            packed = _packed(_kinds(scheme)[0], module.weight.shape)
            made = BlockEmbedding(packed, module.weight.shape[0], dtype)
        if made is not None:
            setattr(model.model.get_submodule(parent), last, made)
    return model


def _linear(linear: Linear, scheme: str) -> torch.nn.Module:
    sizes = getattr(linear, "sizes", ())
    dtype = linear.weight.dtype
    if kinds := _kinds(scheme):
        return _block_linear(linear, kinds)
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


def _kinds(scheme: str) -> list[str]:
    """The kinds of blocks that a scheme names; the last is that of a packed projection's last part."""
    return scheme.split("+") if scheme.split("+")[0] in KINDS else []


def _block_linear(linear: Linear, kinds: list[str]) -> torch.nn.Module:
    outputs, inputs = linear.weight.shape
    sizes = getattr(linear, "sizes", ())
    if len(kinds) == 1 or not sizes:
        packed = _packed(kinds[0], linear.weight.shape)
        return BlockLinear(packed, outputs, bias=linear.bias, sizes=sizes)
    rows = (outputs - sizes[-1], sizes[-1])
    parts = [_packed(kind, (count, inputs)) for kind, count in zip(kinds, rows, strict=True)]
    return MixedBlockLinear(parts, rows, bias=linear.bias, sizes=sizes)


def _packed(kind: str, shape: Sequence[int]) -> torch.Tensor:
    """Random weights in blocks, of a size near those of a random model."""
    rows, inputs = shape
    of = KINDS[kind]
    packed = torch.randint(0, 256, (-(-rows // GROUP), inputs // of.channels, of.size), dtype=torch.uint8)
    small = {"Q4_K": 255, "Q5_K": 255, "Q6_K": 128}.get(kind, 1)  # as bytes: a kernel takes any
    scales = torch.rand(*packed.shape[:2], of.head // 2) * inputs**-0.5 / 2 ** (of.bits - 1) / small
    scales[..., GROUP:] *= 2 ** (of.bits - 1)  # minimums: subtracted where they are scaled
    if of.minimum and small == 1:
        scales[..., GROUP:] *= -1
    packed[..., : of.head] = scales.half().view(torch.uint8)
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
