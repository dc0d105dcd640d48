"""Whether a model fits into this machine's memory, from the headers of its files, before it is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import torch

from piecework.config import EngineConfig
from piecework.devices import Device, make_device
from piecework.errors import ConfigError
from piecework.kvcache import LayerShape, page_bytes
from piecework.models.config import ModelConfig
from piecework.quantization.choose import choose_reader, stated_reader
from piecework.quantization.sizes import float_outline, weight_bytes
from piecework.runner.load import context_limit
from piecework.runner.memory import plan_pages
from piecework.runner.precision import settle
from piecework.runner.programs import cache_dtype, layer_shapes
from piecework.runner.recipe import repacks
from piecework.runner.static_settings import check_slots, check_strategy, choose_capacities
from piecework.weights.checkpoint import Checkpoint
from piecework.weights.dummy import DummyCheckpoint
from piecework.weights.gguf.checkpoint import GgufCheckpoint
from piecework.weights.load import open_checkpoint
from piecework.weights.source import resolve


@dataclass(frozen=True)
class Choice:
    """One way to load the model, and what it takes.

    Attributes:
        dtype, quantization: the settings that choose it; `auto` is the weights as they are stored.
        weight_bytes: of all weights, where each matrix that may be coded in 12 bits can be.
        most_bytes: of all weights, where none can: which it is depends on their values.
        page_bytes: of one page of the KV cache, over all layers.
        tokens: that the cache could hold in all the memory beside the weights; 0: the weights don't fit.
    """

    dtype: str
    quantization: str
    weight_bytes: int
    most_bytes: int
    page_bytes: int
    tokens: int


@dataclass(frozen=True)
class Fit:
    """What a model takes of a device's memory.

    Attributes:
        asked: the choice that the settings make; `others` could be made in its place.
        free_bytes: of the device now, within the limit of the control group if there is one.
        page_size: tokens of a page.
        max_context: tokens of the longest context of model and settings.
        wanted: tokens that have to fit: `max_model_len` if it is given, else a page.
        cache_tokens: that the engine's KV cache would hold; 0 where the model doesn't fit.
        reason: why not, if a setting is at fault.
    """

    model: str
    path: str
    architecture: str
    num_layers: int
    device: str
    asked: Choice
    others: tuple[Choice, ...]
    free_bytes: int
    page_size: int
    max_context: int
    wanted: int
    cache_tokens: int
    reason: str | None = None

    @property
    def fits(self) -> bool:
        """Whether the engine would start."""
        return self.cache_tokens > 0


def probe(name: str) -> str:
    """Return what a device calls itself. Raises ConfigError, or its driver's error, where it isn't there."""
    return make_device(name).fingerprint()


def kernels(config: EngineConfig) -> tuple[bool, str]:
    """Say whether the CPU has kernels, what for, and whether weights are laid out for them; builds them.

    Raises ConfigError where $PIECEWORK_ISA asks for what the machine hasn't.
    """
    device = make_device("cpu")
    built_for = device.fingerprint()
    if built_for == "torch":
        return False, "The CPU has no kernels here: everything runs in torch, slower"
    if repacks(config, device, alone=not config.device.several):
        weights = "repacked for them, bfloat16 to 12 bits"
    else:
        reason = "by these settings" if device.reads_panels() else "which needs AVX-512"
        weights = f"not repacked, {reason}"
    return True, f"The CPU's kernels are built for {built_for}; weights are {weights}"


def fit(config: EngineConfig) -> Fit:
    """Say what the model that `config` names would take; nothing is fetched and no weight is read.

    The sizes are those of loading: the same functions choose the layers that are quantised and the pages
    of the cache. Memory for graphs, on devices that capture some, and for the work of a step comes on top.

    Raises:
        ModelError: the model isn't on this machine or can't be read.
        ConfigError: a setting doesn't fit the model or the device.
    """
    device, load = make_device(config.device.first), config.load
    source = resolve(load.model, revision=load.revision, cache_dir=load.cache_dir, fetch=False)
    with closing(
        open_checkpoint(source, load.load_format, load.seed, cache_dir=load.cache_dir)
    ) as checkpoint:
        model = ModelConfig.from_dict(checkpoint.config)
        limit = context_limit(load.max_model_len, model)
        dtype, quantization = settle(load, checkpoint, model.dtype, device)
        free = device.free_memory()
        asked = _choice(config, model, checkpoint, dtype, quantization, device, free, load.lm_head)
        others = [
            _choice(config, model, checkpoint, other, form, device, free)
            for other, form in _others(checkpoint, device, dtype, quantization)
        ]
        tokens, reason = 0, None
        if asked.weight_bytes < free:
            layers = layer_shapes(float_outline(model, dtype))
            try:
                tokens = _cache_tokens(config, layers, limit, dtype, device, free - asked.weight_bytes)
            except ConfigError as error:
                reason = str(error)
    return Fit(
        model=load.model,
        path=str(source.path),
        architecture=model.architecture,
        num_layers=model.num_layers,
        device=device.name,
        asked=asked,
        others=tuple(others),
        free_bytes=free,
        page_size=config.cache.page_size,
        max_context=limit,
        wanted=load.max_model_len or config.cache.page_size,
        cache_tokens=tokens,
        reason=reason,
    )


def _cache_tokens(
    config: EngineConfig,
    layers: list[LayerShape],
    limit: int,
    dtype: torch.dtype,
    device: Device,
    free: int,
) -> int:
    """Return the tokens that the KV cache would hold; raises ConfigError where it doesn't fit."""
    check_strategy(config, device)
    if config.cache.kv_strategy == "static":
        capacities = choose_capacities(config, limit)
        return check_slots(config, layers, capacities, dtype, free) * capacities.largest
    kept = cache_dtype(config, dtype, device)
    pages = plan_pages(layers, config, limit, kept, device, free)
    return (pages - 1) * config.cache.page_size


def _choice(
    config: EngineConfig,
    model: ModelConfig,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    quantization: str,
    device: Device,
    free: int,
    lm_head: str = "auto",
) -> Choice:
    outline = float_outline(model, dtype)
    reader = choose_reader(checkpoint, quantization, lm_head)
    repacked = repacks(config, device, alone=not config.device.several)
    weights = weight_bytes(outline, checkpoint, reader, repacked=repacked)
    most = max(weights, weight_bytes(outline, checkpoint, reader)) if repacked else weights
    size = config.cache.page_size
    page = page_bytes(layer_shapes(outline), size, cache_dtype(config, dtype, device))
    tokens = max(0, (free - weights) // page - 1) * size  # a page is the dummy that padding writes to
    return Choice(str(dtype).removeprefix("torch."), quantization, weights, most, page, tokens)


def _others(
    checkpoint: Checkpoint, device: Device, dtype: torch.dtype, asked: str
) -> Iterator[tuple[torch.dtype, str]]:
    """Yield what else could be chosen: other precisions, and other forms of float weights."""
    blocks = isinstance(checkpoint, GgufCheckpoint) and checkpoint.has_blocks
    plain = "none" if blocks else "auto"  # for blocks, auto is the device's choice
    stored = plain if asked in ("auto", "none") else asked
    forms = [plain]
    if not isinstance(checkpoint, DummyCheckpoint) and stated_reader(checkpoint) is None:
        forms += ["w8a8-dynamic", *(["gguf"] if blocks else [])]
    for form in forms:
        for other in (torch.float32, torch.bfloat16) if form == plain else (dtype,):
            if (other, form) != (dtype, stored) and device.supports_dtype(other):
                yield other, form
