"""A step as it travels: ids, positions and page tables to the worker, tokens and log probabilities back."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from piecework.runner.batch import BatchItem, ItemResult, Span
from piecework.runner.penalties import as_ids
from piecework.runner.sampler import SamplingState
from piecework.sampling import SamplingParams
from piecework.workers.serving.runner import Shape

_NO_TOKENS = np.empty(0, np.int64)


class Draw(NamedTuple):
    """A SamplingState: `params` is a place in the table of parameters that both ends keep.

    The tokens so far come only where a penalty counts them, as int64. `place` is the state's `index`.
    """

    params: int
    seed: int
    place: int
    banned: tuple[int, ...]
    prompt: bytes
    output: bytes


class Item(NamedTuple):
    """A BatchItem: its page table as int32, its tokens' positions by the first one."""

    token_ids: Sequence[int]
    start: int
    pages: bytes
    draw: Draw | None
    prompt_targets: Sequence[int]
    prompt_top: int
    follows: int | None = None


class Step(NamedTuple):
    """What a worker is asked for: new parameters and their places first, then the items.

    `profiled`: the stages' times are wanted; `examined`: the logits are. `ahead`: see `AheadRunner`.
    """

    params: list[tuple[int, SamplingParams]]
    items: list[Item]
    profiled: bool
    examined: bool = False
    ahead: bool = False


class StepResult(NamedTuple):
    """What a worker answers: an entry per item, and seconds by stage where they were wanted.

    `logits`, where they were wanted, are float32: a row for each item that draws.
    """

    results: list[ItemResult]
    times: dict[str, float]
    logits: bytes = b""


class ServingOptions(NamedTuple):
    """What a host is made from: an engine's settings, which of its devices, and `settled` of `load_on`.

    `store`: the file where ranks above 0 find the others; rank 0 makes it.
    """

    settings: dict[str, Any]
    device: str
    settled: tuple[str, str] | None
    rank: int = 0
    store: str | None = None


class ServingInfo(NamedTuple):
    """What a host tells when it is ready; seconds by stage of its start, and what its programs counted.

    `ranks` are the processes of the other ranks.
    """

    shape: Shape
    times: dict[str, float]
    counters: dict[str, dict[str, int]]
    ranks: tuple[int, ...] = ()


class StepWriter:
    """Turns items into a Step. It remembers which parameters the other end has, up to `capacity` of them."""

    def __init__(self, capacity: int) -> None:
        """Make one; a step has at most `capacity` items."""
        self._places: OrderedDict[int, tuple[int, SamplingParams]] = OrderedDict()  # by identity
        self._capacity = capacity

    def write(self, items: Sequence[BatchItem], profiled: bool) -> Step:
        """Return the step for these items."""
        new: list[tuple[int, SamplingParams]] = []
        written = [
            Item(
                item.token_ids,
                item.span.start,
                _ints(item.pages),
                None if item.sampling is None else self._draw(item.sampling, new),
                item.prompt_targets,
                item.prompt_top,
                item.follows,
            )
            for item in items
        ]
        return Step(new, written, profiled)

    def _draw(self, state: SamplingState, new: list[tuple[int, SamplingParams]]) -> Draw:
        params, prompt, output = state.params, b"", b""
        if params.repetition_penalty != 1.0:
            prompt = as_ids(state.prompt_ids).tobytes()
        if params.counts_output:
            output = as_ids(state.output_ids).tobytes()
        return Draw(self._place(params, new), state.seed, state.index, state.banned_ids, prompt, output)

    def _place(self, params: SamplingParams, new: list[tuple[int, SamplingParams]]) -> int:
        known = self._places.get(id(params))
        if known is not None:
            self._places.move_to_end(id(params))
            return known[0]
        place = len(self._places)
        if place == self._capacity:
            place = self._places.popitem(last=False)[1][0]
        self._places[id(params)] = place, params  # kept, so that the id stays its own
        new.append((place, params))
        return place


class StepReader:
    """The other end of a StepWriter."""

    def __init__(self) -> None:
        self._params: dict[int, SamplingParams] = {}

    def read(self, step: Step) -> list[BatchItem]:
        """Return the items of a step."""
        self._params.update(step.params)
        return [
            BatchItem(
                item.token_ids,
                Span(item.start, len(item.token_ids)),
                array("i", item.pages),
                None if item.draw is None else self._state(item.draw),
                item.prompt_targets,
                item.prompt_top,
                item.follows,
            )
            for item in step.items
        ]

    def _state(self, draw: Draw) -> SamplingState:
        prompt, output = _tokens(draw.prompt), _tokens(draw.output)
        params = self._params[draw.params]
        return SamplingState(params, draw.seed, draw.place, prompt, output, draw.banned)  # type: ignore[arg-type]


def _tokens(ids: bytes) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.frombuffer(ids, np.int64) if ids else _NO_TOKENS


def _ints(pages: Sequence[int]) -> bytes:
    return pages.tobytes() if isinstance(pages, array) else array("i", pages).tobytes()
