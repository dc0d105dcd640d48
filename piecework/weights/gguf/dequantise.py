"""From GGUF blocks to weights, a bounded number of rows at a time.

The formulas are those of the `gguf` package (its `quants` module), which follow ggml-quants.c.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from piecework.weights.gguf import native
from piecework.weights.gguf.types import GgmlType
from piecework.weights.mapped import MappedFile

# Weights in one step: the half-dozen arrays of a step then stay in a core's cache. On the default model
# 2**17 took 0.67 s, 2**14 took 1.8 s and 2**20 0.9 s.
STEP = 2**17

Bytes = npt.NDArray[np.uint8]


@cache
def block_function(kind: str) -> Callable[[Bytes], npt.NDArray[np.float32]]:
    """The function that turns blocks [B, size] of a quantised type into weights [B, block] in float32."""
    from gguf import quants

    function: Callable[[Bytes], npt.NDArray[np.float32]] = getattr(quants, kind).dequantize_blocks
    return function


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def weights_of(raw: Bytes, kind: GgmlType) -> Tensor:
    """The weights in whole blocks: raw [B * size] bytes -> [B * block], float32 or the file's own float."""
    if kind.name in _PLAIN:
        return torch.from_numpy(raw).view(_PLAIN[kind.name])
    with np.errstate(all="ignore"):  # a scale that is not finite is the file's own
        return torch.from_numpy(block_function(kind.name)(raw.reshape(-1, kind.size)).reshape(-1))


def read_rows(file: MappedFile, start: int, kind: GgmlType, out: Tensor, head_dim: int | None = None) -> None:
    """Fill `out` [..., W] with the rows that begin at byte `start` of the file.

    `head_dim`: the rows (for a 1-D tensor, the weights) are those of heads whose two halves the file
    interleaves, and they are put back as halves; see `restore_halves`.
    """
    flat = out.unsqueeze(-1) if head_dim and out.dim() == 1 else out.view(-1, out.shape[-1])
    if native.supports(kind, flat):
        native.fill_rows(file, start, kind, flat, head_dim)
        return
    rows, width = flat.shape
    row_bytes = width // kind.block * kind.size
    unit = head_dim or 1
    step = max(1, STEP // (width * unit)) * unit
    for first in range(0, rows, step):
        count = min(step, rows - first)
        block = weights_of(file.copy(start + first * row_bytes, count * row_bytes), kind).view(count, width)
        flat[first : first + count].copy_(restore_halves(block, head_dim) if head_dim else block)


def restore_halves(rows: Tensor, head_dim: int) -> Tensor:
    """Undo the order of rows [heads * head_dim, W] in which llama.cpp writes the q and k of a llama model.

    Its rotary turns neighbours (2i, 2i+1), that of the Hugging Face model turns (i, i + head_dim / 2), so
    its converter interleaves the halves of each head: `LlamaModel.permute` in convert_hf_to_gguf.py.
    """
    width = rows.shape[-1]
    return rows.view(-1, head_dim // 2, 2, width).transpose(1, 2).reshape(-1, width)
