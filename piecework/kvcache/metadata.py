"""Where attention finds each sequence of a step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AttentionMetadata:
    """Index tensors of a step; see the op `paged_attention` for shapes and meaning.

    `max_query_length`, the most rows that a sequence has, is on the host: 1 says that all decode.
    """

    slots: Tensor
    page_table: Tensor
    query_starts: Tensor
    context_lengths: Tensor
    max_query_length: int
