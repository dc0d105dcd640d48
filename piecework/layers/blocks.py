"""Layers whose weights stay in GGUF's blocks; loading puts them in the place of Linear and Embedding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from piecework.ops.block_kinds import OF_SIZE
from piecework.ops.block_packing import inputs_of, kind_of

_linear_blocks = torch.ops.piecework.linear_blocks.default
_linear_block_parts = torch.ops.piecework.linear_block_parts.default
_embedding_blocks = torch.ops.piecework.embedding_blocks.default


class BlockLinear(nn.Module):
    """y = x W^T + b, with W [outputs, inputs] packed by `pack_blocks` and x quantised by blocks of 32.

    `sizes` are the outputs of each part of a packed projection.
    """

    def __init__(
        self, packed: Tensor, outputs: int, *, bias: Tensor | None = None, sizes: tuple[int, ...] = ()
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.outputs = outputs
        self.sizes = sizes or (outputs,)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, inputs] -> [T, outputs] in x's dtype."""
        y: Tensor = _linear_blocks(x, self.weight, self.outputs, self.bias)
        return y

    def extra_repr(self) -> str:
        """Show sizes and kind in the model's repr."""
        return f"{inputs_of(self.weight)}, {self.outputs}, {kind_of(self.weight).name}"


class MixedBlockLinear(nn.Module):
    """A packed projection whose parts are of several kinds of blocks.

    `parts` are packed by `pack_blocks` and have `outputs` rows each. `sizes` are those of the projections, of
    which neighbours of one kind are one part.
    """

    def __init__(
        self,
        parts: Sequence[Tensor],
        outputs: Sequence[int],
        *,
        bias: Tensor | None = None,
        sizes: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.inputs = inputs_of(parts[0])
        self.kinds = [part.shape[2] for part in parts]
        self.outputs = list(outputs)
        self.weight = nn.Parameter(torch.cat([part.flatten() for part in parts]), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.sizes = sizes or tuple(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, inputs] -> [T, outputs of all parts] in x's dtype."""
        y: Tensor = _linear_block_parts(x, self.weight, self.outputs, self.kinds, self.bias)
        return y

    def extra_repr(self) -> str:
        """Show sizes and kinds in the model's repr."""
        parts = (f"{n} {OF_SIZE[kind].name}" for n, kind in zip(self.outputs, self.kinds, strict=True))
        return f"{self.inputs}, {', '.join(parts)}"


class BlockEmbedding(nn.Module):
    """A table [vocab_size, size] packed by `pack_blocks`, whose rows come out in `dtype`."""

    def __init__(self, packed: Tensor, vocab_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.vocab_size = vocab_size
        self.dtype = dtype

    def forward(self, ids: Tensor) -> Tensor:
        """ids [T] int64 -> [T, size]."""
        rows: Tensor = _embedding_blocks(ids, self.weight, self.dtype)
        return rows

    def project(self, x: Tensor) -> Tensor:
        """x [T, size] -> the product with each row, [T, vocab_size]."""
        y: Tensor = _linear_blocks(x, self.weight, self.vocab_size, None)
        return y

    def extra_repr(self) -> str:
        """Show sizes and kind in the model's repr."""
        return f"{self.vocab_size}, {inputs_of(self.weight)}, {kind_of(self.weight).name}"
