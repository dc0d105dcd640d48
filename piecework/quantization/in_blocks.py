"""Loads a GGUF file without dequantising it: matrices of a kind that has a kernel stay in their blocks."""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from piecework.layers.blocks import BlockEmbedding, BlockLinear, MixedBlockLinear
from piecework.layers.embedding import Embedding
from piecework.layers.linear import Linear
from piecework.layers.parameter import deferred_parameters
from piecework.models.build import build_model
from piecework.models.config import ModelConfig
from piecework.models.decoder import CausalLM
from piecework.native import library
from piecework.ops.block_kinds import KINDS
from piecework.ops.block_packing import pack_blocks, packed_shape
from piecework.quantization.floats import load_floats
from piecework.quantization.targets import kept_float, parts_of
from piecework.weights.gguf.checkpoint import GgufCheckpoint
from piecework.weights.load import THREADS, Shapes

log = logging.getLogger("piecework.load")


def load_in_blocks(
    config: ModelConfig,
    checkpoint: GgufCheckpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int,
    repacked: bool = False,
) -> CausalLM:
    """Build the model of `config`, with linears and the embedding in the file's own blocks.

    The router and the experts of a mixture, matrices of a kind without a kernel, and packed ones of which a
    part is of such a kind, are dequantised to `dtype`; `repacked` is as in `load_model`. Raises ModelError
    as `load_weights` does.
    """
    with deferred_parameters():
        model = build_model(config, dtype=dtype, device=device, max_positions=max_positions)
    found = block_matrices(model, checkpoint)
    taken: dict[str, Shapes] = {}
    for matrix in found.values():
        taken |= {part.name: ((part.rows, matrix.inputs),) for part in matrix.parts}
    originals = {name: model.get_submodule(name) for name in found}
    for name, module in originals.items():
        model.set_submodule(name, _Place(module))
    load_floats(model, checkpoint, device, taken, repacked=repacked)

    def read(name: str) -> list[tuple[Tensor, int]]:
        return _read(checkpoint, found[name], device)

    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        for (name, module), packed in zip(originals.items(), pool.map(read, originals), strict=True):
            model.set_submodule(name, _layer(module, packed, model.get_submodule(name).bias, dtype))
    if found and not (device.type == "cpu" and library() is not None):
        log.warning(
            "%s: no kernel multiplies by blocks here; the reference does, very slowly", checkpoint.where
        )
    _report(checkpoint, [part.name for matrix in found.values() for part in matrix.parts])
    return model.eval()


class _Place(nn.Module):
    """Stands for a layer whose matrix is not there: its bias is read as always, by its `sizes`."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.bias = getattr(layer, "bias", None)
        self.sizes: tuple[int, ...] | None = getattr(layer, "sizes", None)


@dataclass(frozen=True)
class BlockPart:
    """A matrix of the file: its name in the model, rows, and kind of blocks."""

    name: str
    rows: int
    kind: str


@dataclass(frozen=True)
class BlockMatrix:
    """A matrix of the model that stays in blocks: its parts in the file, one after the other."""

    inputs: int
    parts: tuple[BlockPart, ...]

    def runs(self) -> Iterator[tuple[tuple[int, int, int], list[BlockPart]]]:
        """Yield neighbours of one kind, which are packed together, with the shape that they have then."""
        for kind, run in itertools.groupby(self.parts, lambda part: part.kind):
            parts = list(run)
            yield packed_shape(sum(part.rows for part in parts), self.inputs, kind), parts

    @property
    def nbytes(self) -> int:
        """Bytes of all that is packed."""
        return sum(math.prod(shape) for shape, _ in self.runs())


def block_matrices(model: CausalLM, checkpoint: GgufCheckpoint) -> dict[str, BlockMatrix]:
    """Return the linears and embeddings of a float model that stay in blocks, by name."""
    offered = set(checkpoint.names())
    routers = kept_float(model) - {"lm_head"}
    found: dict[str, BlockMatrix] = {}
    for name, module in model.named_modules():
        if not isinstance(module, Linear | Embedding) or name in routers:
            continue
        rows, inputs = module.weight.shape
        parts = [(f"{name}.weight", rows)]
        if isinstance(module, Linear):
            parts = [
                (f"{part.linear}.weight", part.count)
                for part in parts_of(model, name, module, offered.__contains__)
            ]
        if all(part in offered and checkpoint.kind(part).name in KINDS for part, _ in parts):
            kinds = [BlockPart(part, count, checkpoint.kind(part).name) for part, count in parts]
            found[name] = BlockMatrix(inputs, tuple(kinds))
    return found


def _read(checkpoint: GgufCheckpoint, matrix: BlockMatrix, device: torch.device) -> list[tuple[Tensor, int]]:
    """Pack the parts: rows of blocks are independent, so those of a run are just put together."""
    packed = []
    for shape, parts in matrix.runs():
        made = _pack(checkpoint, parts, shape)
        packed.append((made.to(device), sum(part.rows for part in parts)))
    return packed


def _pack(checkpoint: GgufCheckpoint, parts: Sequence[BlockPart], shape: tuple[int, int, int]) -> Tensor:
    if not all(checkpoint.can_pack(part.name) for part in parts):
        rows = [checkpoint.read_blocks(part.name) for part in parts]
        return pack_blocks(rows[0] if len(rows) == 1 else torch.cat(rows), parts[0].kind)
    packed = torch.empty(shape, dtype=torch.uint8)
    packed[-1].zero_()  # its last rows may be none of the parts
    first = 0
    for part in parts:
        checkpoint.pack(part.name, packed, first)
        first += part.rows
    return packed


def _layer(
    module: nn.Module, parts: list[tuple[Tensor, int]], bias: object, dtype: torch.dtype
) -> BlockEmbedding | BlockLinear | MixedBlockLinear:
    packed, rows = parts[0]
    if isinstance(module, Embedding):
        return BlockEmbedding(packed, rows, dtype)
    values = bias.detach() if isinstance(bias, Tensor) else None
    sizes = getattr(module, "sizes", ())
    if len(parts) == 1:
        return BlockLinear(packed, rows, bias=values, sizes=sizes)
    return MixedBlockLinear([p for p, _ in parts], [n for _, n in parts], bias=values, sizes=sizes)


def _report(checkpoint: GgufCheckpoint, kept: Sequence[str]) -> None:
    """Say how many of the file's matrices stay as they are, of which kinds, and how many are made float."""
    names = set(kept)
    rest = [n for n in checkpoint.names() if n not in names and len(checkpoint.shape(n)) > 1]
    log.info(
        "%s: %d matrices stay in their blocks (%s), %d are dequantised%s",
        checkpoint.where,
        len(kept),
        _counted(checkpoint, kept),
        len(rest),
        f" ({_counted(checkpoint, rest)})" if rest else "",
    )


def _counted(checkpoint: GgufCheckpoint, names: Sequence[str]) -> str:
    kinds = Counter(checkpoint.kind(name).name for name in names)
    return ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
