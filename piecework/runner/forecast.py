"""What a warm standby will take of its device's memory, before it is made."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch

from piecework.config import EngineConfig
from piecework.devices import Device, make_device
from piecework.devices.registry import device_class
from piecework.errors import ConfigError, DeviceError
from piecework.kvcache import page_bytes
from piecework.quantization.sizes import float_outline
from piecework.runner.fitting import fit_cache
from piecework.runner.load import Loaded, context_limit
from piecework.runner.memory import plan_pages
from piecework.runner.programs import cache_dtype, layer_shapes
from piecework.runner.static_settings import check_slots, choose_capacities
from piecework.units import format_size

log = logging.getLogger("piecework.failsafe")
_HOST = torch.device("cpu")


@dataclass(frozen=True)
class Forecast:
    """Bytes of weights and KV cache on a device, and what is free there beside the model that serves.

    Memory for graphs, on devices that capture some, and for the work of a step comes on top.
    """

    device: str
    weight_bytes: int
    kv_bytes: int
    free_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "weight_bytes": self.weight_bytes,
            "kv_bytes": self.kv_bytes,
            "free_bytes": self.free_bytes,
        }

    def __str__(self) -> str:
        total = format_size(self.weight_bytes + self.kv_bytes)
        return (
            f"the standby {self.device} takes {total}, {format_size(self.weight_bytes)} of weights and "
            f"{format_size(self.kv_bytes)} of KV cache; {format_size(self.free_bytes)} are free there"
        )


def forecast(config: EngineConfig, loaded: Loaded, name: str) -> Forecast | None:
    """Foretell the memory of a standby on the device `name` beside `loaded`, which serves.

    None where this process can't know it: the device isn't there, or belongs to a process of its own.

    Raises:
        ConfigError: it does not fit; names `standby`, what it needs and what is free.
    """
    if device_class(name.partition(":")[0], name).workers == "process":
        log.info("the standby %s finds out itself whether it fits, in its own process", name)
        return None
    try:
        device = make_device(name)
    except (ConfigError, DeviceError):
        return None  # making the standby fails, and says why
    free = device.free_memory() - _not_yet_written(loaded, device)
    dtype = getattr(torch, loaded.dtype)
    cache, _ = fit_cache(config.cache, device, strict=False)
    config = replace(config, cache=cache)
    kept = cache_dtype(config, dtype, device)
    layers = layer_shapes(float_outline(loaded.model_config, dtype))
    limit = context_limit(config.load.max_model_len, loaded.model_config)
    left = max(free - loaded.weight_bytes, 0)
    try:
        if cache.kv_strategy == "static":
            capacities = choose_capacities(config, limit)
            pages, size = check_slots(config, layers, capacities, kept, left), capacities.largest
        else:
            pages, size = plan_pages(layers, config, limit, kept, device, left), cache.page_size
    except ConfigError as error:
        needs = f"{loaded.weight_bytes} bytes of weights and a KV cache; {max(free, 0)} bytes are free there"
        raise ConfigError(
            "standby", "warm", f"cold, since the standby {name} does not fit: it needs {needs} ({error})"
        ) from error
    return Forecast(name, loaded.weight_bytes, pages * page_bytes(layers, size, kept), free)


def _not_yet_written(loaded: Loaded, device: Device) -> int:
    """Bytes of the cache in use that host memory counts as free until they are written."""
    other: Any = loaded.runner.device
    shared = device.torch_device == _HOST == getattr(other, "torch_device", None)
    return int(loaded.runner.cache.nbytes) if shared else 0
