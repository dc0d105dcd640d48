"""A rank's share of a checkpoint: the loader finds the shapes that its part of the model has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from piecework.errors import ConfigError
from piecework.models.config import ModelConfig
from piecework.models.shard import FIELD, Shard
from piecework.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from piecework.weights.gguf.checkpoint import GgufCheckpoint
    from piecework.weights.gguf.types import GgmlType

_STEP = 2**20  # elements that are read at a time where only a part of each row is kept
_PER_WORD = {"weight_packed": 4}  # channels in one column, where it is not one
_BIASES = ("bias", "quant_bias")


@runtime_checkable
class RowReader(Protocol):
    """A checkpoint that can read some rows of a weight."""

    def read_rows(self, name: str, first: int, out: Tensor) -> None:
        """Copy the rows from `first` on into `out`."""


@dataclass(frozen=True)
class Cut:
    """The rank has `ranges` of the `full` channels along `dim`, one after the other.

    Ranges that go beyond `full` are filled with zeros there.
    """

    dim: int
    full: int
    ranges: tuple[range, ...]

    @property
    def count(self) -> int:
        """How many channels the rank has."""
        return sum(map(len, self.ranges))

    def take(self, whole: Tensor) -> Tensor:
        """Return the rank's part of a weight, or of some rows of one where `dim` is not 0."""
        parts = []
        for own in self.ranges:
            inside = range(min(own.start, self.full), min(own.stop, self.full))
            parts.append(whole.narrow(self.dim, inside.start, len(inside)))
            if len(inside) < len(own):
                shape = list(whole.shape)
                shape[self.dim] = len(own) - len(inside)
                parts.append(whole.new_zeros(shape))
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


def cuts_of(config: ModelConfig, shard: Shard) -> dict[str, tuple[int, int, tuple[range, ...]]]:
    """Map the last part of a module's name to the dimension, channels and ranges of its cut.

    Column-parallel (0): each rank has some outputs. Row-parallel (1): each has some inputs, and the results
    are summed. `config` is that of the whole model.
    """

    def heads(own: range) -> range:
        return range(own.start * config.head_dim, own.stop * config.head_dim)

    q, kv = heads(shard.part(config.num_heads)), heads(shard.heads(config.num_kv_heads))
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    wide = config.intermediate_size
    own, vocabulary = shard.part(wide), shard.rows(config.vocab_size)
    packed = (q, _moved(kv, q_size), _moved(kv, q_size + kv_size))
    return {
        "q_proj": (0, q_size, (q,)),
        "k_proj": (0, kv_size, (kv,)),
        "v_proj": (0, kv_size, (kv,)),
        "qkv_proj": (0, q_size + 2 * kv_size, packed),
        "o_proj": (1, q_size, (q,)),
        "gate_proj": (0, wide, (own,)),
        "up_proj": (0, wide, (own,)),
        "gate_up_proj": (0, 2 * wide, (own, _moved(own, wide))),
        "down_proj": (1, wide, (own,)),
        "embed_tokens": (0, config.vocab_size, (vocabulary,)),
        "lm_head": (0, config.vocab_size, (vocabulary,)),
    }


def _moved(channels: range, by: int) -> range:
    return range(channels.start + by, channels.stop + by)


class ShardedCheckpoint:
    """What a rank keeps of `whole`, under the same names. It is closed with the whole.

    A row-parallel layer's bias is on rank 0 and zeros elsewhere, since results are summed.
    """

    def __init__(self, whole: Checkpoint, config: ModelConfig, shard: Shard) -> None:
        """Read nothing; `config` is that of the whole model."""
        self.whole = whole
        self.where = whole.where
        self.config: dict[str, Any] = whole.config
        self.generation_config: dict[str, Any] = whole.generation_config
        self._shard = shard
        self._dense = cuts_of(config, shard)
        # An expert is a gated MLP of another width.
        self._expert = self._dense
        if config.num_experts:
            self._expert = cuts_of(replace(config, intermediate_size=config.moe_intermediate_size), shard)

    def names(self) -> list[str]:
        """The names of all weights."""
        return self.whole.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the rank's part."""
        shape = self.whole.shape(name)
        cut = self._cut(name, shape)
        if cut is None:
            return shape
        return (*shape[: cut.dim], cut.count, *shape[cut.dim + 1 :])

    def read(self, name: str, out: Tensor) -> None:
        """Copy the rank's part of a weight into `out`, see Checkpoint."""
        if name.endswith(".weight_shape"):
            out.copy_(self._local_shape(name))
            return
        cut = self._cut(name, tuple(out.shape), of_part=True)
        if cut is None:
            self.whole.read(name, out)
            if self._is_other_ranks(name):
                out.zero_()
            return
        shape = list(out.shape)
        shape[cut.dim] = cut.full
        self._read_part(name, cut, shape, out)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which a weight is stored."""
        found: torch.dtype = self.whole.dtype(name)  # type: ignore[attr-defined]  # readers of int8 ask for it
        return found

    def load(self, name: str) -> Tensor:
        """The rank's part of a weight as it is stored, on the CPU."""
        out = torch.empty(self.shape(name), dtype=self.dtype(name))
        self.read(name, out)
        return out

    def kind(self, name: str) -> GgmlType:
        """The type that a weight has in a GGUF file."""
        return self._blocks.kind(name)

    def can_pack(self, name: str) -> bool:
        """Whether `pack` can take the matrix: only one that is not divided."""
        return self._cut(name, self.whole.shape(name)) is None and self._blocks.can_pack(name)

    def pack(self, name: str, packed: Tensor, first: int) -> None:
        """See GgufCheckpoint."""
        self._blocks.pack(name, packed, first)

    def read_blocks(self, name: str) -> Tensor:
        """The rank's part of a matrix in blocks, see GgufCheckpoint; one that cuts a block is refused."""
        found, cut = self._blocks.read_blocks(name), self._cut(name, self.whole.shape(name))
        if cut is None or cut.dim == 0:
            return found if cut is None else cut.take(found).contiguous()
        kind = self.kind(name)
        (own,) = cut.ranges
        if own.start % kind.block or own.stop % kind.block:
            allowed = f"one that leaves {name} whole blocks of {kind.block} channels, of {cut.full} in all"
            raise ConfigError(FIELD, self._shard.size, f"{allowed}; or quantization=none")
        first, last = (edge // kind.block * kind.size for edge in (own.start, own.stop))
        return found[:, first:last].contiguous()

    def close(self) -> None:
        """Close the whole."""
        self.whole.close()

    @property
    def _blocks(self) -> GgufCheckpoint:
        from piecework.weights.gguf.checkpoint import GgufCheckpoint

        assert isinstance(self.whole, GgufCheckpoint), "only its weights stay in blocks"
        return self.whole

    def _read_part(self, name: str, cut: Cut, shape: list[int], out: Tensor) -> None:
        """Read as little as the checkpoint can: the rank's rows, or a few rows at a time."""
        rows = self.whole
        if not isinstance(rows, RowReader):
            whole = torch.empty(shape, dtype=out.dtype)
            self.whole.read(name, whole)
            out.copy_(cut.take(whole))
            return
        if cut.dim == 0:
            first = 0
            for own in cut.ranges:
                part = out[first : first + len(own)]
                inside = max(0, min(own.stop, cut.full) - own.start)
                rows.read_rows(name, own.start, part[:inside])
                part[inside:] = 0
                first += len(own)
            return
        step = max(1, _STEP // math.prod(shape[1:]))
        for start in range(0, shape[0], step):
            some = torch.empty((min(step, shape[0] - start), *shape[1:]), dtype=out.dtype)
            rows.read_rows(name, start, some)
            out[start : start + step] = cut.take(some)

    def _cut(self, name: str, shape: Sequence[int], *, of_part: bool = False) -> Cut | None:
        """How a weight is divided; None: each rank has all. `of_part`: the shape is that of the part."""
        module, suffix = self._split(name)
        found = self._rule(name, module)
        if found is None or suffix == "weight_shape":
            return None
        dim, full, ranges = found
        if ".experts." in name and suffix == module:  # all experts of a layer as one weight [E, N, K]
            dim += 1
        elif dim == 1 and suffix not in ("weight", "weight_packed"):
            return None
        per_word = _PER_WORD.get(suffix, 1) if dim == 1 else 1
        if any(own.start % per_word or (own.stop % per_word and own.stop < full) for own in ranges):
            allowed = f"one that leaves {name} whole words of {per_word} channels, of {full} in all"
            raise ConfigError(FIELD, self._shard.size, allowed)
        words = tuple(range(own.start // per_word, -(-own.stop // per_word)) for own in ranges)
        cut = Cut(dim, -(-full // per_word), words)
        expected = cut.count if of_part else cut.full
        # One scale may stand for all channels.
        return cut if len(shape) > dim and shape[dim] == expected else None

    def _rule(self, name: str, module: str) -> tuple[int, int, tuple[range, ...]] | None:
        return (self._expert if ".experts." in name else self._dense).get(module)

    def _split(self, name: str) -> tuple[str, str]:
        """The last part of the module's name, and what of it the weight is."""
        path = name.split(".")
        if len(path) > 1 and path[-2] == "experts":
            return path[-1], path[-1]
        return path[-2] if len(path) > 1 else "", path[-1]

    def _is_other_ranks(self, name: str) -> bool:
        module, suffix = self._split(name)
        found = self._rule(name, module)
        return found is not None and found[0] == 1 and suffix in _BIASES and self._shard.rank > 0

    def _local_shape(self, name: str) -> Tensor:
        """A packed weight's own shape, which lies beside it."""
        shape = torch.empty(2, dtype=torch.int64)
        self.whole.read(name, shape)
        rule = self._rule(name, self._split(name)[0])
        if rule is not None:
            shape[rule[0]] = sum(map(len, rule[2]))
        return shape


def whole_of(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint that a share belongs to, or the checkpoint itself."""
    return checkpoint.whole if isinstance(checkpoint, ShardedCheckpoint) else checkpoint
