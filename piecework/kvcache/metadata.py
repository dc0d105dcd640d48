"""Where attention finds each sequence of a step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AttentionMetadata:
    """Index tensors of a step; see the op `paged_attention` for shapes and meaning."""

    slots: Tensor
    page_table: Tensor
    query_starts: Tensor
    context_lengths: Tensor
