"""Settings that were made for one device, on the next one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from piecework.compilation import CompilationConfig
from piecework.config import CacheConfig
from piecework.devices import Device
from piecework.devices.base import Phase

_PHASES: tuple[Phase, ...] = ("decode", "prefill")


def fit_settings(settings: CompilationConfig, device: Device) -> tuple[CompilationConfig, list[str]]:
    """Return the settings with `auto` for what `device` doesn't have, and what was changed, as text.

    In strict mode nothing is changed, so that the device refuses them.
    """
    changes: dict[str, Any] = {}
    if settings.strict:
        return settings, []
    for phase in _PHASES:
        mode = getattr(settings, f"{phase}_graph")
        if mode not in ("auto", *device.graph_modes(phase)):
            changes[f"{phase}_graph"] = "auto"
        for sizes in (f"{phase}_capture_sizes", f"max_{phase}_capture_size"):
            if not device.captures and getattr(settings, sizes) is not None:
                changes[sizes] = None
    if settings.compiler != "auto" and settings.compiler.partition(":")[0] not in device.compilers:
        changes["compiler"] = "auto"
    said = [f"{name}={getattr(settings, name)}" for name in changes if "_capture_size" not in name]
    return settings.with_changes(**changes), said


def fit_cache(cache: CacheConfig, device: Device, *, strict: bool) -> tuple[CacheConfig, list[str]]:
    """The same for the KV cache: its own precision where `device` has no attention over int8, and pages where
    it has no other strategy.
    """
    if strict:
        return cache, []
    if cache.kv_strategy not in device.kv_strategies:
        paged = replace(cache, kv_strategy="paged", kv_capacities=None, kv_slots=1, kv_transpose_values=False)
        return paged, [f"kv_strategy={cache.kv_strategy}"]
    if cache.kv_cache_dtype == "auto" or device.int8_kv_cache:
        return cache, []
    return replace(cache, kv_cache_dtype="auto"), [f"kv_cache_dtype={cache.kv_cache_dtype}"]
