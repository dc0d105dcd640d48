"""What a step runs, and the tensors made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from piecework.devices import Device
from piecework.kvcache import DUMMY_PAGE, AttentionMetadata, slots_of
from piecework.runner.sampler import SamplingState
from piecework.sampling import TokenLogprob


@dataclass(frozen=True)
class Span:
    """A run of consecutive tokens or rows: `length` of them from `start` on."""

    start: int
    length: int

    @property
    def stop(self) -> int:
        """One past the last."""
        return self.start + self.length

    @property
    def slice(self) -> slice:
        """The span as a Python slice."""
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class BatchItem:
    """One sequence's part of a step.

    `token_ids` stand at the positions of `span`; `pages` hold the sequence's KV up to there. `sampling`
    is None where the prompt is not complete yet, so that nothing is drawn. `prompt_targets` are the
    tokens whose log probabilities are wanted, row by row from the first on, with `prompt_top` alternatives.
    """

    token_ids: Sequence[int]
    span: Span
    pages: Sequence[int]
    sampling: SamplingState | None = None
    prompt_targets: Sequence[int] = ()
    prompt_top: int = 0


@dataclass(frozen=True)
class ItemResult:
    """What a step gave for one item: the drawn token, log probabilities that were asked for, or an error."""

    token_id: int | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: Sequence[TokenLogprob] = ()
    error: str | None = None


@dataclass(frozen=True)
class BatchInputs:
    """A step as tensors: token ids [T] and positions [T] int64, and each item's span of rows."""

    input_ids: Tensor
    positions: Tensor
    rows: Sequence[Span]
    metadata: AttentionMetadata


def build_inputs(items: Sequence[BatchItem], page_size: int, device: Device) -> BatchInputs:
    """Lay the items' tokens one after the other."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    rows: list[Span] = []
    for item in items:
        rows.append(Span(len(ids), item.span.length))
        ids.extend(item.token_ids)
        positions.extend(range(item.span.start, item.span.stop))
        slots.extend(slots_of(item.pages, item.span.start, item.span.length, page_size))
    width = max(len(item.pages) for item in items)
    table = [[*item.pages, *[DUMMY_PAGE] * (width - len(item.pages))] for item in items]
    starts = [0, *(span.stop for span in rows)]
    contexts = [item.span.stop for item in items]

    def index(values: Sequence[object], dtype: torch.dtype = torch.int32) -> Tensor:
        return device.place(torch.tensor(values, dtype=dtype))

    metadata = AttentionMetadata(
        index(slots), index(table), index(starts), index(contexts), max(item.span.length for item in items)
    )
    return BatchInputs(index(ids, torch.int64), index(positions, torch.int64), rows, metadata)
