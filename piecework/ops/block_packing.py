"""From rows of blocks as a GGUF file has them to packed ones, and from those to numbers."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from piecework.ops.block_fields import FIELDS
from piecework.ops.block_kinds import BLOCK, GROUP, KINDS, OF_SIZE, BlockKind

_STEP = 2**21  # weights that are packed at once: what lies between takes a few bytes for each


def kind_of(packed: Tensor) -> BlockKind:
    """Return the kind of packed weights; ValueError where they are none."""
    if packed.dtype != torch.uint8 or packed.dim() != 3 or packed.shape[2] not in OF_SIZE:
        raise ValueError(f"{packed.dtype} {list(packed.shape)} is no weight in blocks of {', '.join(KINDS)}")
    return OF_SIZE[packed.shape[2]]


def inputs_of(packed: Tensor) -> int:
    """Return K of packed weights; ValueError where they are none."""
    return packed.shape[1] * kind_of(packed).channels


def packed_shape(rows: int, inputs: int, name: str) -> tuple[int, int, int]:
    """Return the shape of packed weights [rows, inputs] of the kind `name`."""
    kind = KINDS[name]
    return -(-rows // GROUP), inputs // kind.channels, kind.size


def pack_blocks(rows: Tensor, name: str) -> Tensor:
    """Put rows as they are in a file into groups of 8, the last one filled up with zeros.

    uint8 [N, bytes of a row] of the kind `name` -> uint8 [ceil(N / 8), K / channels, size].
    """
    kind = KINDS[name]
    count = rows.shape[1] // kind.file_size
    packed = rows.new_empty(-(-rows.shape[0] // GROUP), count, kind.size)
    step = max(1, _STEP // (GROUP * count * kind.channels))
    for first in range(0, packed.shape[0], step):
        some = rows[first * GROUP : (first + step) * GROUP].view(-1, count, kind.file_size)
        some = F.pad(some, (0, 0, 0, 0, 0, -some.shape[0] % GROUP))
        packed[first : first + step] = _pack(some, kind)
    return packed


def _pack(blocks: Tensor, kind: BlockKind) -> Tensor:
    """Pack blocks [8 G, B, file_size]."""
    fields = FIELDS[kind.name](blocks)
    groups, count = blocks.shape[0] // GROUP, blocks.shape[1]
    head = fields.halves.unflatten(0, (groups, GROUP)).unflatten(-1, (-1, 2)).permute(0, 2, 3, 1, 4)
    parts = [_fours(fields.low).flatten(3)]
    if fields.high is not None:
        high, places = _fours(fields.high), _places(kind)
        moved = high.unflatten(3, (-1, len(places))) << places
        united: Tensor = functools.reduce(torch.bitwise_or, moved.unbind(4))
        parts.append(united.flatten(3))
    if fields.small is not None:
        small = fields.small.unflatten(0, (groups, GROUP))
        parts.insert(0, small.permute(0, 2, 3, *((4, 1) if kind.minimum else (1, 4))).flatten(3))
    return torch.cat((head.flatten(2), torch.cat(parts, -1).view(groups, count, -1)), -1)


def _fours(x: Tensor) -> Tensor:
    """[8 G, B, parts, W] -> [G, B, parts, W / 4, 32]: four bytes of each of 8 rows lie together."""
    fours: Tensor = x.contiguous().view(torch.int32).unflatten(0, (-1, GROUP))  # [G, 8, B, parts, W / 4]
    return fours.permute(0, 2, 3, 4, 1).contiguous().view(torch.uint8)


def _places(kind: BlockKind) -> Tensor:
    """Where in a byte the upper bits of the fours begin that share it, [fours, 1]."""
    above = kind.bits - 4
    return torch.arange(0, 8, above, dtype=torch.uint8).view(-1, 1)


def numbers_of(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scales and minimums [G, S, 8] float32, and the integers q [G, S, 8, C] of weights q * scale + minimum.

    S times C channels, C being 32 or, of Q6_K, 16, are all K. q is float32 too.
    """
    kind = kind_of(packed)
    head = packed[..., : kind.head].contiguous().view(torch.float16).float().unflatten(-1, (-1, 1, GROUP))
    body = packed[..., kind.head :].unflatten(-1, (kind.parts, -1))
    q = _integers(body[..., kind.small :], kind).unflatten(-1, (-1, kind.scaled)).movedim(-2, 3)
    scale = head[..., 0, :, :].expand(-1, -1, kind.parts, -1)
    small = body[..., : kind.small]
    if kind.scaled < BLOCK:
        scale = scale.unsqueeze(3) * small.view(torch.int8).unflatten(-1, (GROUP, -1)).transpose(3, 4)
    elif kind.small:
        scale = scale * small[..., :GROUP]
    if not kind.minimum:
        minimum = scale * -kind.zero
    elif kind.small:
        minimum = -(head[..., 1, :, :] * small[..., GROUP:])
    else:
        minimum = head[..., 1, :, :]
    sizes = (packed.shape[0], -1, GROUP)
    return scale.reshape(sizes), minimum.reshape(sizes), q.reshape(*sizes, kind.scaled)


def _integers(weights: Tensor, kind: BlockKind) -> Tensor:
    """[G, B, parts, bytes] -> [G, B, parts, 8, 32] float32."""
    if kind.bits == 8:
        return _rows(weights.contiguous().view(torch.int8)).float()
    low = weights[..., : 4 * BLOCK]
    q = _rows(torch.cat((low & 15, low >> 4), -1))
    if kind.bits > 4:
        high = weights[..., 4 * BLOCK :].unflatten(-1, (-1, 1, BLOCK)) >> _places(kind)
        q = q | _rows((high & (1 << kind.bits - 4) - 1).flatten(-3)) << 4
    return q.float()


def _rows(x: Tensor) -> Tensor:
    """The opposite of `_fours`, but that the groups stay: [..., 32 * 8] -> [..., 8, 32]."""
    fours: Tensor = x.unflatten(-1, (-1, GROUP, 4))
    return fours.transpose(-3, -2).flatten(-2)


def unpack_blocks(packed: Tensor, rows: int) -> Tensor:
    """Return the weights themselves, float32 [rows, K]: the bits that `gguf.quants` gives."""
    scale, minimum, q = numbers_of(packed)
    weights = q * scale.unsqueeze(-1) + minimum.unsqueeze(-1)
    return weights.transpose(1, 2).flatten(2).flatten(0, 1)[:rows]
