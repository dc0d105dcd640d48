"""`linear_blocks`, `linear_block_parts` and `embedding_blocks`: weights that stay in GGUF's blocks.

Packed weights are uint8 [G, B, S]: G groups of 8 rows (the last one filled up with zeros), B blocks, and S
the bytes that one block of 8 rows has, which tells its kind: see block_kinds.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from piecework.ops.block_kinds import BLOCK, GROUP, OF_SIZE
from piecework.ops.block_packing import inputs_of, numbers_of
from piecework.ops.registry import define


def quantize_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] -> integers in [-127, 127] as float32 [T, B, 32] and their scales [T, B]: largest / 127."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1)
    # Not `127 / largest`, which is the reciprocal times 127: kernels divide once, and ties would round apart.
    steps = torch.full_like(largest, 127) / largest
    q = (blocks * torch.where(largest > 0, steps, 0).unsqueeze(-1)).round()
    return q.nan_to_num(0, 0, 0), largest / 127


def _linear_blocks(x: Tensor, packed: Tensor, outputs: int, bias: Tensor | None = None) -> Tensor:
    """y = x W^T + bias with x [..., K], W packed as above, bias [N], N = outputs -> [..., N] in x's dtype.

    Blocks of 32 channels of x are quantised to int8, each with a scale of its own; their products with the
    integers of W are exact, and scaled and added up in float32.
    """
    scale, minimum, q = numbers_of(packed)
    xq, x_scale = quantize_blocks(x.reshape(-1, x.shape[-1]))
    shared = BLOCK // q.shape[-1]  # scales of W for one of x
    xq, x_scale = xq.view(-1, q.shape[1], q.shape[-1]), x_scale.repeat_interleave(shared, 1)
    products = torch.einsum("tbk,gbrk->tgrb", xq, q)
    y = torch.einsum("tgrb,gbr,tb->tgr", products, scale, x_scale)
    y = y + torch.einsum("tb,gbr->tgr", xq.sum(-1) * x_scale, minimum)
    y = y.flatten(1)[:, :outputs]
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype).view(*x.shape[:-1], outputs)


def _linear_blocks_fake(x: Tensor, packed: Tensor, outputs: int, bias: Tensor | None = None) -> Tensor:
    torch._check(x.shape[-1] == inputs_of(packed))
    return x.new_empty((*x.shape[:-1], outputs))


def split_parts(packed: Tensor, inputs: int, outputs: Sequence[int], kinds: Sequence[int]) -> list[Tensor]:
    """Return the parts of W of `linear_block_parts`, each packed as above: views of its bytes."""
    shapes = [
        (-(-rows // GROUP), inputs // OF_SIZE[size].channels, size)
        for rows, size in zip(outputs, kinds, strict=True)
    ]
    parts = packed.split([groups * blocks * size for groups, blocks, size in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _linear_block_parts(
    x: Tensor, packed: Tensor, outputs: Sequence[int], kinds: Sequence[int], bias: Tensor | None = None
) -> Tensor:
    """y = x W^T + bias, where the rows of W are parts of several kinds.

    x [..., K]. Part i has `outputs[i]` rows and blocks of `kinds[i]` bytes; `packed` is uint8 [bytes], all
    parts packed as above one after the other. bias [N], N = sum(outputs) -> [..., N] in x's dtype.
    """
    parts = split_parts(packed, x.shape[-1], outputs, kinds)
    y = torch.cat([_linear_blocks(x, part, rows) for part, rows in zip(parts, outputs, strict=True)], -1)
    return y if bias is None else (y.float() + bias.float()).to(x.dtype)


def _linear_block_parts_fake(
    x: Tensor, packed: Tensor, outputs: Sequence[int], kinds: Sequence[int], bias: Tensor | None = None
) -> Tensor:
    split_parts(packed, x.shape[-1], outputs, kinds)
    return x.new_empty((*x.shape[:-1], sum(outputs)))


def _embedding_blocks(ids: Tensor, packed: Tensor, dtype: torch.dtype) -> Tensor:
    """ids [T], packed weights of [V, H] -> [T, H] in `dtype`. Ids must be checked before."""
    scale, minimum, q = numbers_of(packed[ids // GROUP])
    row = (ids % GROUP).view(-1, 1, 1)
    chosen = q.gather(2, row.unsqueeze(-1).expand(-1, q.shape[1], 1, q.shape[3])).squeeze(2)
    index = row.expand(-1, q.shape[1], 1)
    return (chosen * scale.gather(2, index) + minimum.gather(2, index)).flatten(1).to(dtype)


def _embedding_blocks_fake(ids: Tensor, packed: Tensor, dtype: torch.dtype) -> Tensor:
    return packed.new_empty((*ids.shape, inputs_of(packed)), dtype=dtype)


linear_blocks = define(
    "linear_blocks(Tensor x, Tensor packed, int outputs, Tensor? bias=None) -> Tensor",
    _linear_blocks,
    _linear_blocks_fake,
)
linear_block_parts = define(
    "linear_block_parts(Tensor x, Tensor packed, int[] outputs, int[] kinds, Tensor? bias=None) -> Tensor",
    _linear_block_parts,
    _linear_block_parts_fake,
)
embedding_blocks = define(
    "embedding_blocks(Tensor ids, Tensor packed, ScalarType dtype) -> Tensor",
    _embedding_blocks,
    _embedding_blocks_fake,
)
