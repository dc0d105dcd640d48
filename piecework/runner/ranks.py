"""A process as a rank of a tensor-parallel group: what it says to the others beside the sums of its model."""

from __future__ import annotations

import datetime
import os
import sys
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from piecework.config import EngineConfig
from piecework.devices import Device
from piecework.devices.registry import device_class
from piecework.errors import ConfigError
from piecework.models.shard import FIELD, Shard

HOST = "gloo"
"""The backend of sums between processes of one machine."""
_TENSORS = {"nccl": "cuda", "hccl": "npu"}
ALL_REDUCE = "piecework::all_reduce"


@dataclass(frozen=True)
class Ranks:
    """The group of this process. All ranks call the same methods in the same order."""

    shard: Shard
    device: torch.device

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which draws the tokens."""
        return self.shard.rank == 0

    def gather(self, logits: Tensor, vocab_size: int) -> Tensor | None:
        """Put the ranks' logits [R, V / ranks] together to [R, V] on rank 0; None on the others."""
        import torch.distributed as dist

        own = logits.contiguous()
        parts = [torch.empty_like(own) for _ in range(self.shard.size)]
        dist.all_gather(parts, own)
        return torch.cat(parts, -1)[:, :vocab_size].contiguous() if self.leads else None

    def least(self, number: int) -> int:
        """Return the least of the ranks' numbers, for what all must have as much of."""
        import torch.distributed as dist

        value = torch.tensor([number], dtype=torch.int64, device=self.device)
        dist.all_reduce(value, op=dist.ReduceOp.MIN)
        return int(value.item())

    def most(self, number: int) -> int:
        """Return the largest of the ranks' numbers."""
        return -self.least(-number)


def collectives_of(name: str) -> str:
    """Return the backend that sums over ranks on the device `name`; ConfigError where it has none."""
    backend = device_class(name.partition(":")[0], name).collectives
    if backend is None:
        raise ConfigError("device", name, f"one with sums over several of its kind where {FIELD} is above 1")
    return backend


def join(store: str, shard: Shard, backend: str, timeout: float) -> Ranks:
    """Make this process a rank; returns when all have come.

    The others are found through the file `store`, so that no port is fixed or open to other machines;
    sums between processes of one machine go over its loopback interface. A sum that takes longer than
    `timeout` seconds is an error.
    """
    import torch.distributed as dist

    if sys.platform.startswith("linux"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, shard.size),  # type: ignore[attr-defined]  # documented there
        rank=shard.rank,
        world_size=shard.size,
        timeout=datetime.timedelta(seconds=timeout),
    )
    return Ranks(shard, torch.device(_TENSORS.get(backend, "cpu")))


def fit_collectives(config: EngineConfig, device: Device) -> EngineConfig:
    """Cut the graph at sums over the ranks where the device's graphs can't hold them.

    Raises:
        ConfigError: full graphs or a whole program were asked for.
    """
    size, settings = config.worker.tensor_parallel_size, config.compilation_config
    if settings.whole_program:
        raise ConfigError(
            FIELD, size, "1 where splitting_ops is empty: a whole program has no place for sums"
        )
    if device.captures_collectives:
        return config
    decode = settings.decode_graph
    if decode == "full":
        allowed = (
            f"piecewise or eager with {FIELD}={size}: graphs of {device.name} can't hold sums over ranks"
        )
        raise ConfigError("decode_graph", decode, allowed)
    if decode == "auto" and "full" in device.graph_modes("decode"):
        decode = "piecewise"
    cuts = tuple(dict.fromkeys((*settings.splitting_ops, ALL_REDUCE)))
    return replace(config, compilation_config=settings.with_changes(splitting_ops=cuts, decode_graph=decode))
