"""A rank's share of a model under tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053, section 3)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from piecework.errors import ConfigError

if TYPE_CHECKING:
    from piecework.models.config import ModelConfig

FIELD = "tensor_parallel_size"


@dataclass(frozen=True)
class Shard:
    """Rank `rank` of `size`; of one rank, it is the whole model."""

    rank: int = 0
    size: int = 1

    def part(self, count: int) -> range:
        """Return the rank's share of `count` channels; shares differ by one at most."""
        return range(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def heads(self, count: int) -> range:
        """Return the rank's share of `count` kv heads: one that others have too where they are too few."""
        if count < self.size:
            head = self.rank * count // self.size
            return range(head, head + 1)
        return self.part(count)

    def rows(self, vocab_size: int) -> range:
        """Return the rank's rows of the vocabulary; equally many on all ranks, the last may lie beyond it."""
        count = -(-vocab_size // self.size)
        return range(self.rank * count, (self.rank + 1) * count)


def allowed_sizes(config: ModelConfig) -> tuple[int, ...]:
    """Return the numbers of ranks that a model's heads can be divided by."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    wide = config.intermediate_size
    narrow = min(wide, config.moe_intermediate_size or wide, config.vocab_size)
    return tuple(
        size
        for size in range(1, heads + 1)
        if heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0) and size <= narrow
    )


def check_size(config: ModelConfig, size: int) -> None:
    """Raise ConfigError where the model's heads can't be divided between `size` ranks."""
    allowed = allowed_sizes(config)
    if size not in allowed:
        listed = ", ".join(map(str, allowed))
        what = f"{config.num_heads} heads and {config.num_kv_heads} kv heads"
        raise ConfigError(FIELD, size, f"one of {listed}, by which the model's {what} can be divided")


def shard_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """Return the configuration of a rank's share: its own numbers of heads and channels.

    `vocab_size` stays that of the model. Raises ConfigError as `check_size` does.
    """
    check_size(config, shard.size)
    return replace(
        config,
        num_heads=len(shard.part(config.num_heads)),
        num_kv_heads=len(shard.heads(config.num_kv_heads)),
        intermediate_size=len(shard.part(config.intermediate_size)),
        moe_intermediate_size=len(shard.part(config.moe_intermediate_size)),
        shard=shard,
    )
