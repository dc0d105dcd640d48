"""A GGUF file as a checkpoint."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from piecework.errors import ModelError
from piecework.ops.block_kinds import KINDS
from piecework.weights.gguf import native
from piecework.weights.gguf.config import architecture_of, config_of
from piecework.weights.gguf.dequantise import read_rows, restore_halves
from piecework.weights.gguf.header import Header, TensorInfo, short_header
from piecework.weights.gguf.names import expert_names, model_name, turns_halves
from piecework.weights.gguf.types import READABLE, GgmlType, type_name
from piecework.weights.mapped import MappedFile

_ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class _Part:
    """Where one of the model's weights lies: all of a tensor, or one expert of it."""

    tensor: str
    type: int
    shape: tuple[int, ...]
    start: int
    head_dim: int | None


class GgufCheckpoint:
    """The weights of a GGUF file under the model's names, dequantised as they are read.

    Raises ModelError for a damaged or truncated file, an unknown architecture, a tensor type that isn't
    read, one part of a split file, and metadata that the model could not honour.
    """

    def __init__(self, path: str | os.PathLike[str], cache_dir: str | os.PathLike[str] | None = None) -> None:
        header = short_header(Path(path), cache_dir)
        self.where = str(header.path)
        architecture = architecture_of(header)
        _check_whole(header)
        _check_types(header)
        self._file = MappedFile(header.path)
        self.config = config_of(header, self._rope_factors(header))
        ends = ("bos_token_id", "eos_token_id")
        self.generation_config = {k: self.config[k] for k in ends if self.config[k] is not None}
        head_dim: int | None = self.config["head_dim"] if architecture.interleaved else None
        self._parts: dict[str, _Part] = {}
        for name, info in header.tensors.items():
            if name != _ROPE_FACTORS:
                self._parts.update(_parts(name, info, head_dim))

    def _rope_factors(self, header: Header) -> list[float] | None:
        info = header.tensors.get(_ROPE_FACTORS)
        if info is None:
            return None
        factors = torch.empty(info.shape, dtype=torch.float32)
        read_rows(self._file, info.start, READABLE[info.type], factors)
        return factors.flatten().tolist()

    def names(self) -> list[str]:
        """The model's name of each weight; a tensor that no model has keeps its own."""
        return list(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a weight, rows first."""
        return self._part(name).shape

    def read(self, name: str, out: Tensor) -> None:
        """Dequantise a weight into `out`; ModelError where the shapes differ."""
        part = self._part(name)
        if tuple(out.shape) != part.shape:
            raise ModelError(
                f"{self.where}: tensor {part.tensor} ({name}) has shape {list(part.shape)}, "
                f"not {list(out.shape)}"
            )
        read_rows(self._file, part.start, READABLE[part.type], out, part.head_dim)

    @property
    def has_blocks(self) -> bool:
        """Whether any matrix is in blocks that can be multiplied as they are."""
        return any(READABLE[part.type].name in KINDS for part in self._parts.values())

    def kind(self, name: str) -> GgmlType:
        """The type that a weight has in the file."""
        return READABLE[self._part(name).type]

    def read_blocks(self, name: str) -> Tensor:
        """A matrix as in the file, uint8 [rows, bytes of a row], but for the order of q's and k's rows."""
        part = self._part(name)
        kind = READABLE[part.type]
        rows, width = part.shape
        size = width // kind.block * kind.size
        data = torch.from_numpy(self._file.copy(part.start, rows * size)).view(rows, size)
        return restore_halves(data, part.head_dim) if part.head_dim else data

    def can_pack(self, name: str) -> bool:
        """Whether `pack` can take the matrix."""
        return native.has_kernels(self.kind(name))

    def pack(self, name: str, packed: Tensor, first: int) -> None:
        """Put a matrix into rows `first` on of `packed`, on the CPU: see piecework.ops.block_packing."""
        part = self._part(name)
        native.pack_rows(
            self._file, part.start, READABLE[part.type], packed, part.shape[0], first, part.head_dim
        )

    def close(self) -> None:
        """Unmap the file."""
        self._file.close()

    def _part(self, name: str) -> _Part:
        if name not in self._parts:
            raise ModelError(f"{self.where}: the tensor for {name} is missing")
        return self._parts[name]


def _parts(name: str, info: TensorInfo, head_dim: int | None) -> dict[str, _Part]:
    experts = expert_names(name, info.shape[0])
    if experts is None:
        chosen = head_dim if turns_halves(name) else None
        return {model_name(name) or name: _Part(name, info.type, info.shape, info.start, chosen)}
    assert info.nbytes is not None, "types are checked before"
    size = info.nbytes // info.shape[0]
    return {
        expert: _Part(name, info.type, info.shape[1:], info.start + i * size, None)
        for i, expert in enumerate(experts)
    }


def _check_whole(header: Header) -> None:
    count = header.metadata.get("split.count", 1)
    if count != 1:
        raise ModelError(
            f"{header.path}: one of {count} parts of a split file (split.count) is not supported: "
            "join the parts with `llama-gguf-split --merge`"
        )


def _check_types(header: Header) -> None:
    bad = [f"{n} ({type_name(t.type)})" for n, t in header.tensors.items() if t.nbytes is None]
    if bad:
        known = ", ".join(kind.name for kind in READABLE.values())
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise ModelError(
            f"{header.path}: tensors of an unsupported type: {', '.join(bad[:5])}{more}; supported: {known}"
        )
