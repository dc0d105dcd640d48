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
    `follows` is for a step that is sent while the one before it runs: the item there that draws the one token
    of this item, in whose place `token_ids` has any. `sampling` then lacks that token, but for its `index`.
    """

    token_ids: Sequence[int]
    span: Span
    pages: Sequence[int]
    sampling: SamplingState | None = None
    prompt_targets: Sequence[int] = ()
    prompt_top: int = 0
    follows: int | None = None


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
    begins = np.array([item.span.start for item in items], np.int64)
    lengths = [item.span.length for item in items]
    longest = max(lengths)
    table = _table([item.pages for item in items])
    owners = np.arange(len(items))
    if longest == 1:  # a step of decoding, which should cost little
        starts, positions, contexts = np.arange(len(items) + 1), begins, begins + 1
    else:
        starts = np.cumsum([0, *lengths])
        owners = np.repeat(owners, lengths)
        positions = np.arange(starts[-1]) + (begins - starts[:-1])[owners]
        contexts = begins + lengths
    slots = slots_of(table, owners, positions, page_size)
    ids = np.fromiter(chain.from_iterable([item.token_ids for item in items]), np.int64, len(positions))

    def host(values: NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(values.astype(np.int32, copy=False))

    def placed(values: NDArray[np.integer]) -> Tensor:
        return device.place(host(values))

    lengths_of = placed if device.lengths == "device" else host
    metadata = AttentionMetadata(
        placed(slots), placed(table), lengths_of(starts), lengths_of(contexts), longest
    )
    input_ids, places = (device.place(torch.from_numpy(values)) for values in (ids, positions))
    return BatchInputs(input_ids, places, starts.tolist(), metadata)


def _table(held: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """Return the items' pages [S, most pages] int32; what is missing is the dummy page."""
    counts = [len(pages) for pages in held]
    joined = array("i")
    for pages in held:
        joined.extend(pages)
    shape, found = (len(held), max(counts)), np.frombuffer(joined, np.int32)
    if len(found) == shape[0] * shape[1]:
        return found.reshape(shape)
    table = np.full(shape, DUMMY_PAGE, np.int32)
    table[np.arange(shape[1]) < np.array(counts)[:, None]] = found
    return table
