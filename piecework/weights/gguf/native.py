"""Rows of the commonest kinds of blocks, by kernels that read them where they lie in the file.

They become floats, or are packed as the kernels of `linear_blocks` want them. On the default model that takes
a quarter (packing: a twentieth) of the processor's time that numpy and torch take, and no working memory.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from piecework.native import library
from piecework.native.types import TYPES
from piecework.ops.cpu.kernels import FLOATS, Kernel
from piecework.weights.gguf.types import GgmlType
from piecework.weights.mapped import MappedFile

KINDS = ("Q4_0", "Q4_1", "Q8_0")
STEP = 2**21  # bytes of the file in one call: the file's pages are given back between calls

_dequantise_rows = Kernel("dequantise_rows", "from out", "rows width kind head_dim type")
_pack_rows = Kernel("pack_rows", "from packed", "rows blocks kind head_dim first")


def has_kernels(kind: GgmlType) -> bool:
    """Whether rows of this kind can be read here."""
    return kind.name in KINDS and library() is not None


def supports(kind: GgmlType, out: Tensor) -> bool:
    """Whether `fill_rows` can fill `out`."""
    return has_kernels(kind) and out.device.type == "cpu" and out.dtype in FLOATS and out.is_contiguous()


def fill_rows(file: MappedFile, start: int, kind: GgmlType, out: Tensor, head_dim: int | None) -> None:
    """Fill `out` [N, W] with the rows that begin at byte `start`; see `read_rows` for `head_dim`."""
    rows, width = out.shape
    for first, count, place in _lent(file, start, rows, width // kind.block * kind.size, head_dim):
        to = out[first : first + count].data_ptr()
        _dequantise_rows(place, to, count, width, kind.size, head_dim or 0, TYPES[out.dtype])


def pack_rows(
    file: MappedFile,
    start: int,
    kind: GgmlType,
    packed: Tensor,
    rows: int,
    at: int,
    head_dim: int | None,
) -> None:
    """Put `rows` rows that begin at byte `start` into `packed` (see `pack_blocks`), from its row `at` on.

    `packed` lies on the CPU without gaps.
    """
    blocks = packed.shape[1]
    for first, count, place in _lent(file, start, rows, blocks * kind.size, head_dim):
        _pack_rows(place, packed.data_ptr(), count, blocks, kind.size, head_dim or 0, at + first)


def _lent(
    file: MappedFile, start: int, rows: int, row_bytes: int, head_dim: int | None
) -> Iterator[tuple[int, int, int]]:
    """Yield the first row of each step, which never tears a head, how many it has, and their address."""
    unit = head_dim or 1
    step = max(1, STEP // (row_bytes * unit)) * unit
    for first in range(0, rows, step):
        count = min(step, rows - first)
        with file.lend(start + first * row_bytes, count * row_bytes) as raw:
            yield first, count, raw.ctypes.data
        del raw  # or the file could not be closed before the next garbage collection
