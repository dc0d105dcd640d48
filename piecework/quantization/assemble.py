"""Puts an int8 layer together from the checkpoint's linears that are its parts."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from piecework.layers.embedding import Embedding
from piecework.layers.int8 import Int8Embedding, Int8Linear, StaticInput, W8A8Linear, W8Linear
from piecework.quantization.numerics import covering, offset_bias
from piecework.quantization.reader import Int8Shard, Reader
from piecework.quantization.targets import Target

log = logging.getLogger("piecework.load")


def read_target(
    target: Target, reader: Reader, *, dtype: torch.dtype, device: torch.device
) -> Int8Linear | Int8Embedding:
    """Read a target's parts, each straight into its rows of one int8 weight."""
    rows, inputs = target.module.weight.shape
    weight = torch.empty(rows, inputs, dtype=torch.int8, device=device)
    parts = [weight[part.first : part.first + part.count] for part in target.parts]
    shards = [
        reader.read(part.linear, view, target.bias) for part, view in zip(target.parts, parts, strict=True)
    ]
    if isinstance(target.module, Embedding):
        return Int8Embedding(weight, shards[0].scale, dtype=dtype, weight_only=target.scheme == "w8")
    sizes = tuple(part.count for part in target.parts)
    sizes = getattr(target.module, "sizes", sizes)
    bias = _bias(shards, parts, dtype)
    scale = torch.cat([shard.scale for shard in shards])
    if target.scheme == "w8":
        return W8Linear(weight, scale, dtype=dtype, bias=bias, sizes=sizes)
    if target.scheme == "w8a8-dynamic":
        return W8A8Linear(weight, scale, dtype=dtype, bias=bias, sizes=sizes)
    static, scale, quant_bias, bias = _static(target.name, shards, parts, bias, dtype)
    return W8A8Linear(
        weight,
        scale,
        dtype=dtype,
        bias=bias,
        sizes=sizes,
        static=static,
        quant_bias=quant_bias,
    )


def _bias(shards: Sequence[Int8Shard], parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    if all(shard.bias is None for shard in shards):
        return None
    filled = [
        part.new_zeros(part.shape[0], dtype=torch.float32) if shard.bias is None else shard.bias
        for shard, part in zip(shards, parts, strict=True)
    ]
    return torch.cat(filled).to(dtype)


def _static(
    name: str,
    shards: Sequence[Int8Shard],
    parts: Sequence[Tensor],
    bias: Tensor | None,
    dtype: torch.dtype,
) -> tuple[StaticInput, Tensor, Tensor | None, Tensor | None]:
    """Return the input's scale, and scale, quant_bias and bias of the layer.

    Parts of one product share one quantised input. Where their scales differ, it is quantised once with
    a scale that covers all their ranges; the weights have scales of their own, so they stay as they are.
    """
    given = [shard.static for shard in shards if shard.static is not None]
    assert len(given) == len(shards), "the reader gives every static linear its input's scale"
    shared = covering(given)
    if any(one != shared for one in given):
        log.info("%s: its parts' inputs have different scales; %s covers them all", name, shared)
    elif all(shard.folded is not None for shard in shards):
        folded = [shard.folded for shard in shards if shard.folded is not None]
        scale = torch.cat([one.deq_scale for one in folded])
        return shared, scale, torch.cat([one.quant_bias for one in folded]), bias
    scale = torch.cat([shard.scale for shard in shards]) * shared.scale
    quant_bias = torch.cat([offset_bias(part, shared.offset) for part in parts]) if shared.offset else None
    if any(shard.folded is not None for shard in shards):
        unfolded = [_unfold(shard, part) for shard, part in zip(shards, parts, strict=True)]
        bias = torch.cat(unfolded).to(dtype)
    return shared, scale, quant_bias, bias


def _unfold(shard: Int8Shard, weight: Tensor) -> Tensor:
    """Return the bias that a part's quant_bias holds beside the correction for its own offset."""
    assert shard.folded is not None and shard.static is not None
    own = shard.folded.quant_bias - offset_bias(weight, shard.static.offset)
    return own.float() * shard.folded.deq_scale
