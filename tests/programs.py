"""Small models and programs for tests of the graph pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny import tiny_config
from torch import Tensor

from piecework.compilation import CompilationConfig
from piecework.devices import make_device
from piecework.graph.build import Options, build_program
from piecework.graph.program import Program
from piecework.models.build import build_model
from piecework.models.config import ModelConfig
from piecework.models.decoder import CausalLM

MAX_POSITIONS = 512


def random_model(name: str, layers: int = 2, *, seed: int = 0, **overrides: Any) -> CausalLM:
    """One of the tiny models with seeded random weights, no two of them equal."""
    if name == "qwen3_moe":
        overrides.setdefault("mlp_only_layers", [])
    overrides = {"num_hidden_layers": layers, "max_position_embeddings": MAX_POSITIONS, **overrides}
    config = ModelConfig.from_dict(tiny_config(name, **overrides).to_dict())
    model = build_model(config, dtype=torch.float32, device="cpu", max_positions=MAX_POSITIONS)
    randomize(model, seed)
    return model


def randomize(model: torch.nn.Module, seed: int = 0) -> None:
    """Give every parameter seeded random values that keep the hidden states of a size near one."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
        parameter.copy_(noise * scale + (1.0 if parameter.dim() == 1 else 0.0))


def inputs_of(model: CausalLM, count: int, seed: int = 0) -> list[Tensor]:
    """Ids, positions and, for a model with experts, the number of valid rows, of `count` tokens."""
    generator = torch.Generator().manual_seed(seed + count)
    ids = torch.randint(0, model.config.vocab_size, (count,), generator=generator)
    made = [ids, torch.arange(count)]
    return [*made, torch.tensor([count])] if model.config.num_experts else made


def options(compiler: str = "eager", *, cache_dir: Path | None = None, **config: Any) -> Options:
    """Options for the CPU with fresh counters."""
    chosen = CompilationConfig(compiler=compiler, **config)
    return Options(make_device("cpu"), chosen, cache_dir=cache_dir)


def program_of(model: CausalLM, compiler: str = "eager", **settings: Any) -> tuple[Program, Options]:
    """The program of a model's body, and the options with its counters."""
    chosen = options(compiler, **settings)
    return build_program(model, chosen), chosen
