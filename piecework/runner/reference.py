"""The reference of an audit: the same model once more, on a device whose numbers are believed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from piecework.config import EngineConfig
from piecework.devices import make_device
from piecework.profile import Profile
from piecework.runner.fitting import fit_cache, fit_settings
from piecework.runner.load import Loaded

log = logging.getLogger("piecework.failsafe")


def load_reference(
    config: EngineConfig,
    load_on: Callable[[EngineConfig, Profile, str, tuple[str, str] | None], Loaded],
    settled: tuple[str, str],
) -> Loaded:
    """Load the model on `config.audit.audit_device`, with weights, programs and a KV cache of its own.

    `settled` are precision and quantisation of the device that is audited. Faults planned on devices, pieces
    placed by hand, and ranks are none of the reference's. Raises what `load_on` raises.
    """
    name = config.audit.audit_device
    assert name is not None, "there is one where something is audited"
    device = make_device(name)
    settings, said = fit_settings(config.compilation_config, device)
    cache, more = fit_cache(config.cache, device, strict=settings.strict)
    if said or more:
        log.info("the reference %s runs without what it doesn't have: %s", name, ", ".join([*said, *more]))
    own = replace(
        config,
        device=replace(config.device.alone(name), inject_fault=None, place=None),
        worker=replace(config.worker, tensor_parallel_size=1),
        compilation_config=settings,
        cache=cache,
    )
    return load_on(own, Profile(config.profile), name, settled)
