"""`linear_blocks` and `embedding_blocks`: weights that stay in GGUF's blocks of 32, of 4 or 8 bits each.

Packed weights are uint8 [G, B, S]: G groups of 8 rows (the last one filled up with zeros), B = K / 32
blocks, and S the bytes that one block of 8 rows has, which tells its kind: 144 for Q4_0, 160 for Q4_1, 272
for Q8_0, as many as in the file (block structs of ggml-common.h). They are 8 scales in float16, for Q4_1 8
minimums in float16, and the weights in such an order that four channels of all 8 rows lie together. A
4-bit weight is q * scale + minimum, with the minimum -8 * scale in Q4_0; an 8-bit one is q * scale.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from piecework.ops.registry import define

BLOCK = 32
GROUP = 8
SIZES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
"""Bytes of a block of one row, by ggml's name of the kind."""
_KINDS = {size * GROUP: kind for kind, size in SIZES.items()}


def kind_of(packed: Tensor) -> str:
    """Return the kind of packed weights; ValueError where they are none."""
    if packed.dtype != torch.uint8 or packed.dim() != 3 or packed.shape[2] not in _KINDS:
        raise ValueError(f"{packed.dtype} {list(packed.shape)} is no weight in blocks of {', '.join(SIZES)}")
    return _KINDS[packed.shape[2]]


def pack_blocks(rows: Tensor, kind: str) -> Tensor:
    """Put rows as they are in a file, uint8 [N, B * size], into groups of 8: uint8 [ceil(N / 8), B, S]."""
    size = SIZES[kind]
    blocks = F.pad(rows.view(rows.shape[0], -1, size), (0, 0, 0, 0, 0, -rows.shape[0] % GROUP))
    groups = blocks.view(-1, GROUP, blocks.shape[1], size).transpose(1, 2)
    head = 4 if kind == "Q4_1" else 2
    scales = groups[..., :head].unflatten(-1, (-1, 2)).transpose(2, 3)  # [G, B, 1 or 2, 8, 2]
    weights = groups[..., head:].unflatten(-1, (-1, 4)).transpose(2, 3)  # [G, B, 4 or 8, 8, 4]
    return torch.cat((scales.flatten(2), weights.flatten(2)), -1).contiguous()


def _parts(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scales and minimums [G, B, 8] float32, and the integers q [G, B, 8, 32] float32."""
    kind = kind_of(packed)
    head = 2 * GROUP * (2 if kind == "Q4_1" else 1)
    scales = packed[..., :head].contiguous().view(torch.float16).float().unflatten(-1, (-1, GROUP))
    scale = scales[..., 0, :]
    weights = packed[..., head:].unflatten(-1, (-1, GROUP, 4)).transpose(2, 3).flatten(3)
    if kind == "Q8_0":
        return scale, torch.zeros_like(scale), weights.contiguous().view(torch.int8).float()
    minimum = scales[..., 1, :] if kind == "Q4_1" else scale * -8
    return scale, minimum, torch.cat((weights & 15, weights >> 4), -1).float()


def unpack_blocks(packed: Tensor, rows: int) -> Tensor:
    """Return the weights themselves, float32 [rows, K]."""
    scale, minimum, q = _parts(packed)
    weights = q * scale.unsqueeze(-1) + minimum.unsqueeze(-1)
    return weights.transpose(1, 2).flatten(2).flatten(0, 1)[:rows]


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
    scale, minimum, q = _parts(packed)
    flat = x.reshape(-1, x.shape[-1])
    xq, x_scale = quantize_blocks(flat)
    products = torch.einsum("tbk,gbrk->tgrb", xq, q)
    sums = xq.sum(-1)
    y = torch.einsum("tgrb,gbr,tb->tgr", products, scale, x_scale)
    y = y + torch.einsum("tb,gbr->tgr", sums * x_scale, minimum)
    y = y.flatten(1)[:, :outputs]
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype).view(*x.shape[:-1], outputs)


def _linear_blocks_fake(x: Tensor, packed: Tensor, outputs: int, bias: Tensor | None = None) -> Tensor:
    torch._check(x.shape[-1] == packed.shape[1] * BLOCK)
    return x.new_empty((*x.shape[:-1], outputs))


def _embedding_blocks(ids: Tensor, packed: Tensor, dtype: torch.dtype) -> Tensor:
    """ids [T], packed weights of [V, H] -> [T, H] in `dtype`. Ids must be checked before."""
    scale, minimum, q = _parts(packed[ids // GROUP])
    row = (ids % GROUP).view(-1, 1, 1)
    chosen = q.gather(2, row.unsqueeze(-1).expand(-1, q.shape[1], 1, BLOCK)).squeeze(2)
    index = row.expand(-1, q.shape[1], 1)
    return (chosen * scale.gather(2, index) + minimum.gather(2, index)).flatten(1).to(dtype)


def _embedding_blocks_fake(ids: Tensor, packed: Tensor, dtype: torch.dtype) -> Tensor:
    return packed.new_empty((*ids.shape, packed.shape[1] * BLOCK), dtype=dtype)


linear_blocks = define(
    "linear_blocks(Tensor x, Tensor packed, int outputs, Tensor? bias=None) -> Tensor",
    _linear_blocks,
    _linear_blocks_fake,
)
embedding_blocks = define(
    "embedding_blocks(Tensor ids, Tensor packed, ScalarType dtype) -> Tensor",
    _embedding_blocks,
    _embedding_blocks_fake,
)
