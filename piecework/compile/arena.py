"""Places for what lives between the calls of a piece: memory that nothing needs any more is used again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from piecework.compile.plan import Size

ALIGNMENT = 64


@dataclass(frozen=True)
class Life:
    """So many bytes, from the call with number `first` that touches them to number `last`."""

    size: Size
    first: int
    last: int


@dataclass
class _Block:
    size: Size
    lives: list[Life] = field(default_factory=list)

    def free(self, wanted: Life) -> bool:
        return all(wanted.last < life.first or life.last < wanted.first for life in self.lives)


def lay_out(lives: Sequence[Life]) -> tuple[list[Size], Size]:
    """Return where each begins, a multiple of 64 bytes at any number of tokens, and how much all take.

    Blocks are shared by those that don't live at the same time; the largest come first, so that a later
    one fits into the block of an earlier one. Sizes grow with the tokens, so they are compared by that.
    """
    blocks: list[_Block] = []
    chosen: dict[int, int] = {}
    for i in sorted(range(len(lives)), key=lambda i: lives[i].size, reverse=True):
        life = lives[i]
        place = next((b for b, block in enumerate(blocks) if block.free(life)), len(blocks))
        if place == len(blocks):
            blocks.append(_Block(Size(0, 0)))
        block = blocks[place]
        block.size = Size(*(max(a, _aligned(b)) for a, b in zip(block.size, life.size, strict=True)))
        block.lives.append(life)
        chosen[i] = place
    starts = [Size(0, 0)]
    for block in blocks:
        starts.append(starts[-1].plus(block.size))
    return [starts[chosen[i]] for i in range(len(lives))], starts[-1]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
