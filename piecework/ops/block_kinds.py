"""The kinds of GGUF's blocks that have kernels, and how their bytes lie in memory.

Rows are in groups of 8. A block of 8 rows has

* 8 scales d in float16, and where the kind has minimums 8 of them, m, in float16;
* for each 32 channels, of which Q4_0 to Q8_0 have one in a block and the K kinds eight:

  * of the K kinds 16 bytes: 8 scales s and 8 minimums t without a sign (Q4_K, Q5_K), or for each row two
    signed scales, of the first 16 channels and of the last (Q6_K);
  * the weights. Byte (8 k + r) 4 + c is channel 4 k + c of row r in 8 bits. In fewer, 128 bytes have the
    lower four: those of channel 4 k + c, k < 4, and above them those of 16 + 4 k + c. Then follow the upper
    ones. In 5 bits they are 32 bytes: bit k of byte 4 r + c belongs to channel 4 k + c of row r. In 6 bits
    they are 32 bytes for channels below 16, with bits 2 k and 2 k + 1, and as many for the others.

A weight q is q d + m in Q4_1 and Q5_1, (q - zero) d in Q4_0, Q5_0 and Q8_0, q (d s) - m t in Q4_K and Q5_K,
and (q - 32) (d s) in Q6_K, as in ggml-quants.c. All products but the sum with a minimum are exact in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCK = 32
"""Channels of activations that share a scale."""
GROUP = 8
"""Rows of weights that lie together."""


@dataclass(frozen=True)
class BlockKind:
    """See the module.

    Attributes:
        name: ggml's. file_size: bytes of a block of one row in a file.
        bits: of a weight. zero: the weight that stands for 0.
        channels: of a block. scaled: those that share a scale.
        minimum: whether there are minimums.
    """

    name: str
    file_size: int
    bits: int
    channels: int = BLOCK
    scaled: int = BLOCK
    minimum: bool = False
    zero: int = 0

    @property
    def parts(self) -> int:
        """How many times 32 channels a block has."""
        return self.channels // BLOCK

    @property
    def head(self) -> int:
        """Bytes before the first 32 channels."""
        return 2 * GROUP * (2 if self.minimum else 1)

    @property
    def small(self) -> int:
        """Bytes before the weights of 32 channels."""
        return 2 * GROUP if self.parts > 1 else 0

    @property
    def size(self) -> int:
        """Bytes of a block of 8 rows. No two kinds have the same, so that it tells the kind."""
        return self.head + self.parts * (self.small + GROUP * BLOCK // 8 * self.bits)


KINDS = {
    kind.name: kind
    for kind in (
        BlockKind("Q4_0", 18, 4, zero=8),
        BlockKind("Q4_1", 20, 4, minimum=True),
        BlockKind("Q5_0", 22, 5, zero=16),
        BlockKind("Q5_1", 24, 5, minimum=True),
        BlockKind("Q8_0", 34, 8),
        BlockKind("Q4_K", 144, 4, 256, minimum=True),
        BlockKind("Q5_K", 176, 5, 256, minimum=True),
        BlockKind("Q6_K", 210, 6, 256, scaled=16, zero=32),
    )
}
"""By ggml's name."""
OF_SIZE = {kind.size: kind for kind in KINDS.values()}
"""By the bytes of a block of 8 rows."""
