"""What changes logits before a token is chosen: logit bias, banned tokens, penalties for repetition.

The formulas are those of the OpenAI API (presence and frequency penalty) and of CTRL (Keskar et al. 2019,
https://arxiv.org/abs/1909.05858, repetition penalty), in the order that vLLM and transformers use.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from piecework.runner.sampler import SamplingState

Ids = NDArray[np.int64]


def needs_edit(state: SamplingState) -> bool:
    """True where `edit` would change this row's logits."""
    return state.params.edits or bool(state.banned_ids)


def edit(logits: Tensor, rows: Sequence[int], states: Sequence[SamplingState]) -> None:
    """Change `rows` of logits [R,V] float32 in place; `states[i]` belongs to row `rows[i]`.

    In this order: logit_bias is added, banned ids become -inf, ids of prompt or output are divided
    (multiplied where negative) by repetition_penalty, ids of the output lose frequency_penalty per
    occurrence and presence_penalty once. Only the entries that change are touched. Ids outside the
    vocabulary have no logit and change nothing.
    """
    size = logits.shape[-1]
    bias, banned, repeated, counted = _Entries(size), _Entries(size), _Entries(size), _Entries(size)
    for row, state in zip(rows, states, strict=True):
        params = state.params
        if params.logit_bias:
            bias.add(row, as_ids(params.logit_bias), np.fromiter(params.logit_bias.values(), np.float32))
        if state.banned_ids:
            banned.add(row, as_ids(state.banned_ids), -np.inf)
        if params.repetition_penalty != 1.0:
            seen = np.concatenate((as_ids(state.prompt_ids), as_ids(state.output_ids)))
            repeated.add(row, seen, params.repetition_penalty)
        if params.presence_penalty or params.frequency_penalty:
            ids, counts = np.unique(as_ids(state.output_ids), return_counts=True)
            counted.add(row, ids, params.frequency_penalty * counts + params.presence_penalty)
    flat = logits.view(-1)
    for entries, change in (
        (bias, lambda old, value: old + value),
        (banned, lambda old, value: value),
        # An id that occurs twice is written twice with the same value, since `old` is read before.
        (repeated, lambda old, value: torch.where(old > 0, old / value, old * value)),
        (counted, lambda old, value: old - value),
    ):
        if entries:
            index, values = entries.tensors(logits.device)
            flat[index] = change(flat[index], values)


def as_ids(ids: Iterable[int]) -> Ids:
    """Return token ids as an array; free for numpy arrays and `array.array`, 30 ns an id for a list."""
    if isinstance(ids, np.ndarray):
        return ids.astype(np.int64, copy=False)
    return np.fromiter(ids, np.int64)


class _Entries:
    """Places in flattened logits, each with a value, gathered row by row."""

    def __init__(self, vocab_size: int) -> None:
        self._size = vocab_size
        self._index: list[Ids] = []
        self._values: list[NDArray[np.float32]] = []

    def __bool__(self) -> bool:
        return bool(self._index)

    def add(self, row: int, ids: Ids, values: float | NDArray[np.floating]) -> None:
        known = (ids >= 0) & (ids < self._size)
        self._index.append(ids[known] + row * self._size)
        self._values.append(np.broadcast_to(np.asarray(values, np.float32), ids.shape)[known])

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        index = torch.from_numpy(np.concatenate(self._index))
        values = torch.from_numpy(np.concatenate(self._values))
        return index.to(device), values.to(device)
