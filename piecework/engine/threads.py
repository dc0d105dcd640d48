"""How many threads a step gets on the CPU where nobody says so."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from piecework.config import EngineConfig
from piecework.config.processors import usable_processors


def default_threads() -> int:
    """Return torch's number, but no more than the processors that this process may use."""
    return min(torch.get_num_threads(), usable_processors())


def leave_core(config: EngineConfig) -> EngineConfig:
    """Return the settings of a server: of more than two cores one is left for HTTP.

    Where `threads` or OMP_NUM_THREADS says how many, they are as given.
    """
    if config.device.threads is not None or os.environ.get("OMP_NUM_THREADS"):
        return config
    ranks = config.worker.tensor_parallel_size
    cores = usable_processors() if ranks > 1 else default_threads()
    if cores <= 2:
        return config
    threads = max(1, (cores - 1) // (ranks * config.worker.data_parallel_size))
    return replace(config, device=replace(config.device, threads=threads))
