"""`linear_coded` and `embedding_coded`: bfloat16 weights in 12 bits, without a loss.

The upper byte of a bfloat16, sign and most of the exponent, is one of few. A block of 16 rows x 32 channels
has a table of up to 16 of them, four bits for each weight that choose one, and the lower bytes as they are; a
block with more different ones is spilled and keeps all. Coded weights are uint8 [bytes], see
native/src/coded.h: all blocks, those of 16 rows after those of the 16 before, then their tables, then slots
for what spilled blocks have more.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from piecework.ops.registry import define

ROWS, CHANNELS = 16, 32
_BLOCK, _TABLE, _SLOT = 768, 16, 256
_BLOCKS_A_SLOT = 32


def coded_counts(rows: int, inputs: int) -> tuple[int, int]:
    """Return how many blocks and how many slots a coded matrix [rows, inputs] has."""
    blocks = -(-rows // ROWS) * -(-inputs // CHANNELS)
    return blocks, blocks // _BLOCKS_A_SLOT + 1


def coded_size(rows: int, inputs: int) -> int:
    """Return the bytes of a coded matrix [rows, inputs]: 12.25 bits a weight, and a little for the slots."""
    blocks, slots = coded_counts(rows, inputs)
    return blocks * (_BLOCK + _TABLE) + slots * _SLOT


def decode(coded: Tensor, rows: int, inputs: int) -> Tensor:
    """Coded weights -> bfloat16 [rows, inputs], bit for bit those that they were made of."""
    count, slots = coded_counts(rows, inputs)
    blocks, tables, rest = coded.split([count * _BLOCK, count * _TABLE, slots * _SLOT])
    tables = tables.view(count, _TABLE)
    low, codes = blocks.view(count, _BLOCK).split([512, 256], 1)
    choices = codes.view(count, 4, 1, 64) >> torch.tensor([0, 4], dtype=torch.uint8).view(1, 1, 2, 1)
    high = tables.gather(1, (choices & 15).flatten(1).long())
    spilled = (tables[:, 0] == tables[:, 1]).nonzero().squeeze(1)
    slot = (tables[spilled, 4:8].contiguous().view(torch.int32).flatten().long() & 0xFFFFFFFF) % slots
    high[spilled] = torch.cat((codes[spilled], rest.view(slots, _SLOT)[slot]), 1)
    numbers = (low.short() & 255 | high.short() << 8).view(torch.bfloat16)
    # [panel, block, pair of words, four rows, word, row, channel]
    numbers = numbers.view(-(-rows // ROWS), -1, 8, 4, 2, 4, 2).permute(0, 3, 5, 1, 2, 4, 6)
    whole: Tensor = numbers.reshape(-(-rows // ROWS) * ROWS, -1)
    return whole[:rows, :inputs].contiguous()


def _linear_coded(x: Tensor, coded: Tensor, outputs: int, bias: Tensor | None = None) -> Tensor:
    """y = x W^T + bias with x [..., K] bfloat16, W [N, K] coded, N = outputs, bias [N] -> [..., N]."""
    return F.linear(x, decode(coded, outputs, x.shape[-1]), bias)


def _linear_coded_fake(x: Tensor, coded: Tensor, outputs: int, bias: Tensor | None = None) -> Tensor:
    torch._check(coded.shape[0] == coded_size(outputs, x.shape[-1]))
    return x.new_empty((*x.shape[:-1], outputs))


def _embedding_coded(ids: Tensor, coded: Tensor, vocab_size: int, size: int) -> Tensor:
    """ids [T], coded weights of [vocab_size, size] -> bfloat16 [T, size]. Ids must be checked before."""
    return F.embedding(ids, decode(coded, vocab_size, size))


def _embedding_coded_fake(ids: Tensor, coded: Tensor, vocab_size: int, size: int) -> Tensor:
    torch._check(coded.shape[0] == coded_size(vocab_size, size))
    return coded.new_empty((*ids.shape, size), dtype=torch.bfloat16)


linear_coded = define(
    "linear_coded(Tensor x, Tensor coded, int outputs, Tensor? bias=None) -> Tensor",
    _linear_coded,
    _linear_coded_fake,
)
embedding_coded = define(
    "embedding_coded(Tensor ids, Tensor coded, int vocab_size, int size) -> Tensor",
    _embedding_coded,
    _embedding_coded_fake,
)
