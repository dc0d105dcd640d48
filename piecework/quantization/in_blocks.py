"""Loads a GGUF file without dequantising it: matrices of a kind that has a kernel stay in their blocks."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from piecework.layers.blocks import BlockEmbedding, BlockLinear, MixedBlockLinear
from piecework.layers.embedding import Embedding
from piecework.layers.linear import Linear
from piecework.layers.parameter import deferred_parameters, materialise
from piecework.models.build import build_model
from piecework.models.config import ModelConfig
from piecework.models.decoder import CausalLM
from piecework.native import library
from piecework.ops.block_kinds import KINDS
from piecework.ops.block_packing import pack_blocks
from piecework.quantization.targets import kept_float, parts_of
from piecework.weights.gguf.checkpoint import GgufCheckpoint
from piecework.weights.load import Shapes, load_weights

log = logging.getLogger("piecework.load")


def load_in_blocks(
    config: ModelConfig,
    checkpoint: GgufCheckpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int,
) -> CausalLM:
    """Build the model of `config`, with linears and the embedding in the file's own blocks.

    The router and the experts of a mixture, matrices of a kind without a kernel, and packed ones of which a
    part is of such a kind, are dequantised to `dtype`. Raises ModelError as `load_weights` does.
    """
    with deferred_parameters():
        model = build_model(config, dtype=dtype, device=device, max_positions=max_positions)
    offered = set(checkpoint.names())
    routers = kept_float(model) - {"lm_head"}
    found: dict[str, list[_Part]] = {}
    taken: dict[str, Shapes] = {}
    for name, module in model.named_modules():
        if not isinstance(module, Linear | Embedding) or name in routers:
            continue
        parts = [(f"{name}.weight", module.weight.shape[0])]
        if isinstance(module, Linear):
            parts = [
                (f"{part.linear}.weight", part.count)
                for part in parts_of(model, name, module, offered.__contains__)
            ]
        if all(part in offered and checkpoint.kind(part).name in KINDS for part, _ in parts):
            found[name] = [_Part(part, rows, checkpoint.kind(part).name) for part, rows in parts]
            taken |= {part: ((rows, module.weight.shape[1]),) for part, rows in parts}
    originals = {name: model.get_submodule(name) for name in found}
    for name, module in originals.items():
        model.set_submodule(name, _Place(module))
    materialise(model, device)
    load_weights(model, checkpoint, taken)
    for name, module in originals.items():
        bias = model.get_submodule(name).bias
        layer = _layer(module, _read(checkpoint, found[name], device), bias, dtype)
        model.set_submodule(name, layer)
    if found and not (device.type == "cpu" and library() is not None):
        log.warning(
            "%s: no kernel multiplies by blocks here; the reference does, very slowly", checkpoint.where
        )
    _report(checkpoint, [part.name for parts in found.values() for part in parts])
    return model.eval()


class _Place(nn.Module):
    """Stands for a layer whose matrix is not there: its bias is read as always, by its `sizes`."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.bias = getattr(layer, "bias", None)
        self.sizes: tuple[int, ...] | None = getattr(layer, "sizes", None)


@dataclass(frozen=True)
class _Part:
    """A matrix of the file: its name in the model, rows, and kind of blocks."""

    name: str
    rows: int
    kind: str


def _read(
    checkpoint: GgufCheckpoint, parts: Sequence[_Part], device: torch.device
) -> list[tuple[Tensor, int]]:
    """Pack the parts. Rows of blocks are independent, so those of neighbours of one kind are put together."""
    packed = []
    for kind, run in itertools.groupby(parts, lambda part: part.kind):
        some = list(run)
        rows = [checkpoint.read_blocks(part.name) for part in some]
        made = pack_blocks(rows[0] if len(rows) == 1 else torch.cat(rows), kind)
        packed.append((made.to(device), sum(part.rows for part in some)))
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
