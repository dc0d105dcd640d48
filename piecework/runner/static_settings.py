"""The static KV strategy: what it refuses, and its cache."""

from __future__ import annotations

import torch

from piecework.config import CacheConfig, EngineConfig
from piecework.devices import Device
from piecework.errors import ConfigError
from piecework.kvcache import Capacities, LayerShape, StaticKVCache
from piecework.models.decoder import CausalLM
from piecework.profile import Profile
from piecework.runner.programs import layer_shapes

_PAGED_ONLY = ("kv_cache_dtype", "num_pages", "max_num_pages", "page_size")
_STATIC_ONLY = ("kv_capacities", "kv_slots", "kv_transpose_values")


def check_strategy(config: EngineConfig, device: Device) -> None:
    """Refuse what doesn't go with the KV strategy, by name.

    Raises ConfigError.
    """
    cache, settings, default = config.cache, config.compilation_config, CacheConfig()
    strategy = cache.kv_strategy
    if strategy not in device.kv_strategies:
        allowed = ", ".join(device.kv_strategies)
        raise ConfigError("kv_strategy", strategy, f"{allowed} on {device.name}")
    others = _STATIC_ONLY if strategy == "paged" else _PAGED_ONLY
    for name in others:
        value = getattr(cache, name)
        if value != getattr(default, name):
            other = "static" if strategy == "paged" else "paged"
            raise ConfigError(name, value, f"for kv_strategy={other} only")
    if strategy == "paged":
        return
    if device.watches_cache:
        fault = config.device.inject_fault
        raise ConfigError("inject_fault", fault, "no fault of the cache with kv_strategy=static")
    if settings.whole_program:
        raise ConfigError("splitting_ops", [], "for kv_strategy=paged: static programs are whole already")
    for name in ("decode_graph", "prefill_graph"):
        if (mode := getattr(settings, name)) not in ("auto", "eager"):
            raise ConfigError(name, mode, "auto or eager with kv_strategy=static, which captures nothing")


def choose_capacities(config: EngineConfig, limit: int) -> Capacities:
    """Settle capacities and chunk for contexts of at most `limit` tokens; see Capacities.choose."""
    steps = config.scheduler
    chunk = min(steps.chunk_size, steps.max_num_batched_tokens)
    return Capacities.choose(config.cache.capacities, limit, chunk, config.load.max_model_len)


def check_slots(
    config: EngineConfig, layers: list[LayerShape], capacities: Capacities, dtype: torch.dtype, free: int
) -> int:
    """Return the number of slots. Raises ConfigError where they don't fit into `free` bytes, or into
    `kv_cache_memory`.
    """
    slots, limit = config.cache.kv_slots, config.cache.kv_cache_memory
    needed = slots * sum(layer.page_bytes(capacities.largest, dtype) for layer in layers)
    room = free if limit is None else min(limit, free)
    if needed > room:
        what = f"they take {needed} bytes, for {capacities.largest} tokens each (kv_capacities)"
        raise ConfigError("kv_slots", slots, f"as many as fit into {room} bytes; {what}")
    return slots


def make_static_cache(
    model: CausalLM, config: EngineConfig, limit: int, dtype: torch.dtype, device: Device, profile: Profile
) -> StaticKVCache:
    """Allocate the slots. Raises ConfigError where there is no room for them."""
    layers, capacities = layer_shapes(model), choose_capacities(config, limit)
    slots = check_slots(config, layers, capacities, dtype, device.free_memory())
    transposed = config.cache.kv_transpose_values
    return StaticKVCache(
        layers, capacities, slots, dtype, device, transpose_values=transposed, profile=profile
    )
