"""What a step runs, and the tensors made of it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from piecework.devices import Device
from piecework.kvcache import DUMMY_PAGE, AttentionMetadata, slots_of
from piecework.runner.sampler import SamplingState
from piecework.sampling import TokenLogprob


class Span(NamedTuple):
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


class BatchItem(NamedTuple):
    """One sequence's part of a step.

    `token_ids` stand at the positions of `span`; `pages` hold the sequence's KV up to there, and are read
    fastest from an array of C ints. `sampling`
    is None where the prompt is not complete yet, so that nothing is drawn. `prompt_targets` are the
    tokens whose log probabilities are wanted, row by row from the first on, with `prompt_top` alternatives.
    """

    token_ids: Sequence[int]
    span: Span
    pages: Sequence[int]
    sampling: SamplingState | None = None
    prompt_targets: Sequence[int] = ()
    prompt_top: int = 0


class ItemResult(NamedTuple):
    """What a step gave for one item: the drawn token, log probabilities that were asked for, or an error."""

    token_id: int | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: Sequence[TokenLogprob] = ()
    error: str | None = None


@dataclass(frozen=True)
class BatchInputs:
    """A step as tensors: token ids [T] and positions [T] int64, and where each item's rows begin: item i has
    those from `starts[i]` to `starts[i + 1]`.
    """

    input_ids: Tensor
    positions: Tensor
    starts: Sequence[int]
    metadata: AttentionMetadata


def build_inputs(items: Sequence[BatchItem], page_size: int, device: Device) -> BatchInputs:
    """Lay the items' tokens one after the other."""
    spans = [item.span for item in items]
    begins = np.fromiter([span.start for span in spans], np.int64, len(spans))
    lengths = np.fromiter([span.length for span in spans], np.int64, len(spans))
    starts = np.zeros(len(spans) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    tokens = int(starts[-1])
    ids = np.fromiter(chain.from_iterable([item.token_ids for item in items]), np.int64, tokens)
    table = _table([item.pages for item in items])
    owners = np.repeat(np.arange(len(spans)), lengths)
    positions = np.arange(tokens) + (begins - starts[:-1])[owners]

    def index(values: NDArray[np.integer]) -> Tensor:
        return device.place(torch.from_numpy(values.astype(np.int32)))

    metadata = AttentionMetadata(
        index(slots_of(table, owners, positions, page_size)),
        device.place(torch.from_numpy(table)),
        index(starts),
        index(begins + lengths),
        int(lengths.max()),
    )
    input_ids, places = (device.place(torch.from_numpy(values)) for values in (ids, positions))
    return BatchInputs(input_ids, places, starts.tolist(), metadata)


def _table(held: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """Return the items' pages [S, most pages] int32; what is missing is the dummy page."""
    counts = np.fromiter(map(len, held), np.int64, len(held))
    joined = array("i")
    for pages in held:
        joined.extend(pages)
    table = np.full((len(held), int(counts.max())), DUMMY_PAGE, np.int32)
    table[np.arange(table.shape[1]) < counts[:, None]] = np.frombuffer(joined, np.int32)
    return table
