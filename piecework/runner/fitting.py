"""Settings that were made for one device, on the next one."""

from __future__ import annotations

from typing import Any

from piecework.compilation import CompilationConfig
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
        sizes = f"{phase}_capture_sizes"
        if not device.captures and getattr(settings, sizes) is not None:
            changes[sizes] = None
    if settings.compiler != "auto" and settings.compiler.partition(":")[0] not in device.compilers:
        changes["compiler"] = "auto"
    said = [f"{name}={getattr(settings, name)}" for name in changes if not name.endswith("_sizes")]
    return settings.with_changes(**changes), said
