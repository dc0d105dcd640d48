"""Loads a GGUF file without dequantising it: matrices of a kind that has a kernel stay in their blocks."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from piecework.layers.blocks import BlockEmbedding, BlockLinear
from piecework.layers.embedding import Embedding
from piecework.layers.linear import Linear
from piecework.layers.parameter import deferred_parameters, materialise
from piecework.models.build import build_model
from piecework.models.config import ModelConfig
from piecework.models.decoder import CausalLM
from piecework.native import library
from piecework.ops.block_linear import SIZES, pack_blocks
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

    A matrix of another kind, a packed one whose parts differ in kind, and the router and the experts of a
    mixture are dequantised to `dtype`. Raises ModelError as `load_weights` does.
    """
    with deferred_parameters():
        model = build_model(config, dtype=dtype, device=device, max_positions=max_positions)
    offered = set(checkpoint.names())
    routers = kept_float(model) - {"lm_head"}
    found: dict[str, list[str]] = {}
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
        names = [part for part, _ in parts]
        if _kind(checkpoint, names, offered) is not None:
            found[name] = names
            taken |= {part: ((rows, module.weight.shape[1]),) for part, rows in parts}
    originals = {name: model.get_submodule(name) for name in found}
    for name, module in originals.items():
        model.set_submodule(name, _Place(module))
    materialise(model, device)
    load_weights(model, checkpoint, taken)
    for name, module in originals.items():
        kind = _kind(checkpoint, found[name], offered)
        assert kind is not None
        packed = _pack(checkpoint, found[name], kind).to(device)
        model.set_submodule(name, _layer(module, packed, model.get_submodule(name).bias, dtype))
    if found and not (device.type == "cpu" and library() is not None):
        log.warning(
            "%s: no kernel multiplies by blocks here; the reference does, very slowly", checkpoint.where
        )
    log.info("%s: %d matrices stay in their blocks", checkpoint.where, len(found))
    return model.eval()


class _Place(nn.Module):
    """Stands for a layer whose matrix is not there: its bias is read as always, by its `sizes`."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.bias = getattr(layer, "bias", None)
        self.sizes: tuple[int, ...] | None = getattr(layer, "sizes", None)


def _kind(checkpoint: GgufCheckpoint, names: Sequence[str], offered: set[str]) -> str | None:
    """Return the one kind that the weights have, if there is a kernel for it."""
    if not offered.issuperset(names):
        return None
    kinds = {checkpoint.kind(name).name for name in names}
    kind = kinds.pop()
    return kind if not kinds and kind in SIZES else None


def _pack(checkpoint: GgufCheckpoint, names: Sequence[str], kind: str) -> Tensor:
    """Rows of blocks are independent, so those of the parts are just put together."""
    return pack_blocks(torch.cat([checkpoint.read_blocks(name) for name in names]), kind)


def _layer(module: nn.Module, packed: Tensor, bias: object, dtype: torch.dtype) -> nn.Module:
    if isinstance(module, Embedding):
        return BlockEmbedding(packed, module.weight.shape[0], dtype)
    assert isinstance(module, Linear)
    values = bias.detach() if isinstance(bias, Tensor) else None
    return BlockLinear(packed, module.weight.shape[0], bias=values, sizes=getattr(module, "sizes", ()))
