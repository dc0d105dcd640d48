"""From a configuration to a runner: find the model, load it, and give the rest of the memory its cache."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from piecework.cache import cache_root
from piecework.config import EngineConfig
from piecework.devices import Device, make_device
from piecework.errors import ConfigError
from piecework.kvcache import PagedKVCache, StaticKVCache
from piecework.layers.coded import is_laid_out
from piecework.models.config import ModelConfig
from piecework.models.shard import FIELD, check_size, shard_config
from piecework.profile import Profile
from piecework.quantization.choose import choose_reader, name_of
from piecework.quantization.load import load_model
from piecework.runner.memory import make_cache
from piecework.runner.precision import settle
from piecework.runner.programs import cache_dtype, make_programs
from piecework.runner.ranks import Ranks, fit_collectives
from piecework.runner.recipe import make_recipe
from piecework.runner.runner import Runner
from piecework.runner.spare import Spares
from piecework.runner.static_settings import check_strategy, choose_capacities, make_static_cache
from piecework.sampling import SamplingParams
from piecework.tokenizer.load import load_tokenizer
from piecework.tokenizer.tokenizer import Tokenizer
from piecework.weights.checkpoint import Checkpoint
from piecework.weights.load import open_checkpoint
from piecework.weights.sharded import ShardedCheckpoint
from piecework.weights.source import Source, resolve

log = logging.getLogger("piecework.load")


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to run, and what the engine must know of it.

    `dtype` and `quantization` are the settings that make the same of it on another device; `quantized` is the
    quantisation that its weights have by them, and `repacked` says whether any are laid out for the kernels.
    """

    runner: Runner
    model_config: ModelConfig
    tokenizer: Tokenizer | None
    default_params: SamplingParams
    eos_ids: tuple[int, ...]
    max_model_len: int
    weight_bytes: int
    dtype: str
    quantization: str
    quantized: str
    repacked: bool


@dataclass(frozen=True)
class Front:
    """What the engine must know of a model apart from its weights."""

    model_config: ModelConfig
    tokenizer: Tokenizer | None
    default_params: SamplingParams
    eos_ids: tuple[int, ...]


def load_front(config: EngineConfig, profile: Profile) -> Front:
    """Load what the engine needs where the weights are in another process. Raises as `load` does."""
    with profile.time("load.source"):
        source = _resolve(config)
    with profile.time("load.config"), closing(_open(config, source)) as checkpoint:
        model_config = ModelConfig.from_dict(checkpoint.config)
        check_size(model_config, config.worker.tensor_parallel_size)
        generation = dict(checkpoint.generation_config)
    with profile.time("load.tokenizer"):
        tokenizer = _tokenizer(config, source)
    return _front(model_config, tokenizer, generation)


def load(
    config: EngineConfig,
    profile: Profile,
    device: Device | None = None,
    spares: Spares | None = None,
    *,
    with_tokenizer: bool = True,
    ranks: Ranks | None = None,
) -> Loaded:
    """Load what `config.load` names onto `device`, by default the one that `config.device` names.

    `spares` are devices for pieces that fail there. A worker process needs no tokenizer. Each of
    `ranks` loads its share of the weights, and all get as many pages.

    Raises:
        ModelError: the model can't be found or read.
        ConfigError: a setting doesn't fit the model or the device.
    """
    device = device or make_device(config.device.first)
    device.set_threads(config.device.threads)
    if ranks is None and config.worker.tensor_parallel_size > 1:
        raise ConfigError(
            FIELD, config.worker.tensor_parallel_size, "1 where the model is loaded into this process"
        )
    if ranks is not None:
        config = fit_collectives(config, device)
    options = config.load
    with profile.time("load.source"):
        source = _resolve(config)
    with profile.time("load.config"):
        checkpoint = _open(config, source)
    try:
        with profile.time("load.config"):
            model_config = ModelConfig.from_dict(checkpoint.config)
            dtype, quantization = settle(options, checkpoint, model_config.dtype, device)
            if ranks is not None:
                checkpoint = ShardedCheckpoint(checkpoint, model_config, ranks.shard)
                model_config = shard_config(model_config, ranks.shard)
            reader = choose_reader(checkpoint, quantization, options.lm_head)
            check_strategy(config, device)
            cache_dtype(config, dtype, device)  # refuses one that the device lacks
            limit = context_limit(options.max_model_len, model_config)
            if config.cache.kv_strategy == "static":
                choose_capacities(config, limit)
            recipe = make_recipe(config, device, model_config, dtype, limit, spares)
        with profile.time("load.tokenizer"):
            tokenizer = _tokenizer(config, source) if with_tokenizer else None
        with profile.time("load.weights"):
            model = load_model(
                model_config,
                checkpoint,
                reader,
                dtype=dtype,
                device=device.torch_device,
                max_positions=limit,
                repacked=recipe.repacks,
            )
            device.prepare_weights(model)
        generation = dict(checkpoint.generation_config)
    finally:
        checkpoint.close()
    weight_bytes = sum(p.nbytes for p in model.parameters())
    profile.add_bytes("load.weights", weight_bytes)
    programs = make_programs(model, recipe, config, device, profile, piece_folder(config), limit, ranks=ranks)
    with profile.time("load.cache"):
        cache: PagedKVCache | StaticKVCache
        if config.cache.kv_strategy == "static":
            cache = make_static_cache(model, config, limit, dtype, device, profile)
        else:
            cache = make_cache(model, config, limit, dtype, device, programs.reserved_bytes, ranks)
    fits = min(limit, cache.longest)
    if fits < limit and options.max_model_len is None:
        log.warning("the context is limited to %d tokens (the model has %d) by the KV cache", fits, limit)
    front = _front(model_config, tokenizer, generation)
    return Loaded(
        runner=Runner(programs, cache, profile, ranks),
        model_config=model_config,
        tokenizer=tokenizer,
        default_params=front.default_params,
        eos_ids=front.eos_ids,
        max_model_len=fits,
        weight_bytes=weight_bytes,
        dtype=str(dtype).removeprefix("torch."),
        quantization=quantization,
        quantized=name_of(reader),
        repacked=any(map(is_laid_out, model.modules())),
    )


def _resolve(config: EngineConfig) -> Source:
    return resolve(config.load.model, revision=config.load.revision, cache_dir=config.load.cache_dir)


def _open(config: EngineConfig, source: Source) -> Checkpoint:
    options = config.load
    return open_checkpoint(source, options.load_format, options.seed, cache_dir=options.cache_dir)


def _tokenizer(config: EngineConfig, source: Source) -> Tokenizer | None:
    options = config.load
    if options.tokenizer is not None:
        source = resolve(options.tokenizer, cache_dir=options.cache_dir)
    return load_tokenizer(
        source, cache_dir=options.cache_dir, chat_template=_chat_template(options.chat_template)
    )


def _front(model_config: ModelConfig, tokenizer: Tokenizer | None, generation: Mapping[str, Any]) -> Front:
    eos = {*model_config.eos_ids, *_as_ids(generation.get("eos_token_id"))}
    if tokenizer is not None:
        eos.update(tokenizer.eos_ids)
    return Front(model_config, tokenizer, default_params(generation), tuple(sorted(eos)))


def piece_folder(config: EngineConfig) -> Path:
    """Return where compiled pieces are kept."""
    chosen = config.compilation_config.compile_cache_dir
    return Path(chosen).expanduser() if chosen else cache_root(config.load.cache_dir) / "pieces"


def context_limit(asked: int | None, model: ModelConfig) -> int:
    """Return the longest context: what was asked for, or what the model can; more is a ConfigError."""
    if asked is not None and asked > model.max_position:
        raise ConfigError("max_model_len", asked, f"at most the model's {model.max_position} positions")
    return asked or model.max_position


def _chat_template(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("chat_template", path, f"a readable text file ({error})") from error


def _as_ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)


def default_params(generation: Mapping[str, Any]) -> SamplingParams:
    """Read a generation_config.json's sampling settings; `do_sample: false` means greedy."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    known = {f.name for f in fields(SamplingParams)}
    chosen = {n: generation[n] for n in names if n in known and generation.get(n) is not None}
    if generation.get("do_sample") is False:
        chosen["temperature"] = 0.0
    return SamplingParams(**chosen)
