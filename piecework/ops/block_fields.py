"""What the blocks of a GGUF file consist of, kind by kind: the block structs of ggml-common.h."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor


class Fields(NamedTuple):
    """Bytes of blocks [N, B], for each `part` of 32 channels.

    Attributes:
        halves: d, and m where there are minimums, in float16, [N, B, 2 or 4].
        small: s and t of the K kinds, or the two scales of Q6_K, [N, B, parts, 2].
        low: four bits of channels i and i + 16 in byte i, [N, B, parts, 16]; all eight, [N, B, parts, 32].
        high: the bits above them, [N, B, parts, 32].
    """

    halves: Tensor
    small: Tensor | None
    low: Tensor
    high: Tensor | None


def _plain(head: int, blocks: Tensor) -> Fields:
    return Fields(blocks[..., :head], None, blocks[..., None, head:], None)


def _q5(head: int, blocks: Tensor) -> Fields:
    """Bit j of the 32 behind the halves is the fifth of weight j."""
    high = blocks[..., head : head + 4, None] >> torch.arange(8, dtype=torch.uint8) & 1
    return Fields(blocks[..., :head], None, blocks[..., None, head + 4 :], high.flatten(-2).unsqueeze(-2))


def _repaired(low: Tensor, dim: int) -> Tensor:
    """Bytes [..., 32] of channel i of two parts -> two times [..., 16], put together along a new `dim`."""
    first, last = low[..., :16], low[..., 16:]
    return torch.stack(((first & 15) | (last << 4), (first >> 4) | (last & 0xF0)), dim)


def _scales_and_minimums(packed: Tensor) -> Tensor:
    """Twelve bytes of 6-bit numbers -> [..., 8, 2]: `get_scale_min_k4` of ggml-quants.c."""
    first, second, last = packed.split(4, -1)
    scales = torch.cat((first & 63, (last & 15) | (first >> 6 << 4)), -1)
    minimums = torch.cat((second & 63, (last >> 4) | (second >> 6 << 4)), -1)
    return torch.stack((scales, minimums), -1)


def _q4_k(blocks: Tensor) -> Fields:
    """Byte i of the c-th 32 has channel i of parts 2 c and 2 c + 1."""
    low = _repaired(blocks[..., 16:].unflatten(-1, (4, 32)), -2).flatten(-3, -2)
    return Fields(blocks[..., :4], _scales_and_minimums(blocks[..., 4:16]), low, None)


def _q5_k(blocks: Tensor) -> Fields:
    """As Q4_K; bit p of byte i of 32 is the fifth of channel i of part p."""
    high = blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8).view(8, 1) & 1
    low = _repaired(blocks[..., 48:].unflatten(-1, (4, 32)), -2).flatten(-3, -2)
    return Fields(blocks[..., :4], _scales_and_minimums(blocks[..., 4:16]), low, high)


def _q6_k(blocks: Tensor) -> Fields:
    """Two halves; byte i of the j-th 32 of each has channel i of its parts j and j + 2.

    Bits 2 p and 2 p + 1 of byte i of 32 are the upper ones of channel i of the half's part p.
    """
    low = _repaired(blocks[..., :128].unflatten(-1, (2, 2, 32)), -3).flatten(-4, -2)
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> torch.tensor([[0], [2], [4], [6]]).byte() & 3
    scales = blocks[..., 192:208].unflatten(-1, (8, 2))
    return Fields(blocks[..., 208:], scales, low, high.flatten(-3, -2))


FIELDS: dict[str, Callable[[Tensor], Fields]] = {
    "Q4_0": partial(_plain, 2),
    "Q4_1": partial(_plain, 4),
    "Q5_0": partial(_q5, 2),
    "Q5_1": partial(_q5, 4),
    "Q8_0": partial(_plain, 2),
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
"""From blocks of a file, uint8 [N, B, file_size], to their fields, by ggml's name of the kind."""
