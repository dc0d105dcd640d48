"""Which types a model's matrices have in memory, and how much of it they take."""

from __future__ import annotations

from collections import Counter

from torch import nn

from piecework.explain.report import CODED, Weights
from piecework.layers.blocks import BlockEmbedding, BlockLinear, MixedBlockLinear
from piecework.layers.coded import CodedEmbedding, CodedLinear
from piecework.ops.block_kinds import OF_SIZE
from piecework.ops.block_linear import split_parts
from piecework.ops.block_packing import kind_of


def describe_weights(model: nn.Module) -> tuple[Weights, ...]:
    """Count matrices by type, the largest share of memory first; of a mixed projection each part counts."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            found: list[tuple[str, int]] = []
            if isinstance(module, MixedBlockLinear) and parameter is module.weight:
                parts = split_parts(parameter, module.inputs, module.outputs, module.kinds)
                found = [(OF_SIZE[part.shape[2]].name, part.nbytes) for part in parts]
            elif isinstance(module, CodedLinear | CodedEmbedding) and parameter is module.weight:
                found = [(CODED, parameter.nbytes)]
            elif isinstance(module, BlockLinear | BlockEmbedding) and parameter is module.weight:
                found = [(kind_of(parameter).name, parameter.nbytes)]
            elif parameter.dim() > 1:
                found = [(str(parameter.dtype).removeprefix("torch."), parameter.nbytes)]
            for name, size in found:
                counts[name] += 1
                sizes[name] += size
    return tuple(Weights(name, counts[name], size) for name, size in sizes.most_common())
