"""How large the KV cache is."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from piecework.config import CacheConfig, EngineConfig
from piecework.devices import Device
from piecework.errors import ConfigError
from piecework.kvcache import LayerShape, PagedKVCache, page_bytes, pages_for
from piecework.models.decoder import CausalLM
from piecework.runner.programs import cache_dtype, layer_shapes
from piecework.runner.ranks import Ranks

log = logging.getLogger("piecework.load")


def make_cache(
    model: CausalLM,
    config: EngineConfig,
    max_model_len: int,
    dtype: torch.dtype,
    device: Device,
    reserved_bytes: int = 0,
    ranks: Ranks | None = None,
) -> PagedKVCache:
    """Size and allocate the KV cache: `num_pages`, else `kv_cache_memory`, else the device's default.

    No more is taken than the most requests at their longest can use, and `reserved_bytes` of the device
    stay free. `ranks` have as many pages each. A cache that holds less than the `max_model_len` that the
    user asked for is refused.
    """
    begin, most = config.cache.num_pages, config.cache.max_num_pages
    if begin is not None and most is not None and most < begin:
        raise ConfigError("max_num_pages", most, f"at least num_pages={begin}")
    layers = layer_shapes(model)
    dtype = cache_dtype(config, dtype, device)
    free = device.free_memory() - reserved_bytes
    if ranks is not None and device.torch_device.type == "cpu":  # they share it
        free //= ranks.shard.size
    pages = plan_pages(layers, config, max_model_len, dtype, device, free)
    pages = pages if ranks is None else ranks.least(pages)
    asked = config.cache.max_num_pages
    cache = PagedKVCache(layers, pages, config.cache.page_size, dtype, device, asked)
    if asked is not None and not cache.resizable:
        log.warning("max_num_pages=%d: the device %s can't resize a cache", asked, device.name)
    return cache


def plan_pages(
    layers: Sequence[LayerShape],
    config: EngineConfig,
    max_model_len: int,
    dtype: torch.dtype,
    device: Device,
    free: int,
) -> int:
    """Return how many pages of `dtype` `make_cache` takes of `free` bytes; raises ConfigError as it does."""
    size = config.cache.page_size
    per_page = page_bytes(layers, size, dtype)
    most = config.scheduler.max_num_seqs * pages_for(max_model_len, size) + 1
    pages = min(_wanted_pages(config.cache, per_page, device, free), most)
    asked = config.load.max_model_len
    longest = pages_for(asked, size) if asked else 1
    if pages - 1 < longest:
        field = "num_pages" if config.cache.num_pages is not None else "kv_cache_memory"
        raise ConfigError(
            field,
            getattr(config.cache, field),
            f"at least {longest + 1} pages or {(longest + 1) * per_page} bytes, for one request of "
            f"{asked or size} tokens and the dummy page",
        )
    if pages * per_page > free:
        raise ConfigError(
            "kv_cache_memory", pages * per_page, f"at most the {free} bytes that are free on {device.name}"
        )
    return pages


def _wanted_pages(cache: CacheConfig, per_page: int, device: Device, free: int) -> int:
    if cache.num_pages is not None:
        return cache.num_pages
    if cache.kv_cache_memory is not None:
        return cache.kv_cache_memory // per_page
    return min(device.default_kv_cache_memory(max(free, 0)), free) // per_page
