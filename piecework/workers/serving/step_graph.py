"""The engine's step as a graph of tasks: recorded once per shape, and held to the rings' limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import count
from typing import Protocol

import torch

from piecework.config import EngineConfig
from piecework.runner.batch import BatchItem
from piecework.runner.runner import HEAD_ROWS
from piecework.workers.endpoint import Region, Scalar
from piecework.workers.tasks.arguments import Allocate, TaskArgs
from piecework.workers.tasks.functions import Function
from piecework.workers.tasks.handles import Handle
from piecework.workers.tasks.limits import Limits
from piecework.workers.tasks.tags import Parameter, Tag
from piecework.workers.tasks.worker import NODE, Worker

_MOST_SHAPES = 4096


class Sizes(Protocol):
    """What a step's outputs depend on of a model."""

    @property
    def hidden_size(self) -> int:
        """Numbers of a token's state."""
        ...

    @property
    def vocab_size(self) -> int:
        """Numbers of a row of logits."""
        ...


class StepGraph:
    """What a step asks of its worker: its message in, body, head and draw, its tokens out.

    The worker runs all of it as one call, so that nothing of the graph is sent. Here it is made without data,
    by the rules of any other graph, the first time that a shape comes; what was admitted once always is.
    Prompts' log probabilities are heads over some rows at a time, each in a scope of its own.
    """

    def __init__(self, limits: Limits, hidden: int, vocab: int, dtype: torch.dtype) -> None:
        """Begin without shapes. `hidden` and `vocab` are the model's sizes, `dtype` what it runs in."""
        self._hidden, self._vocab, self._dtype = hidden, vocab, dtype
        self._paper = _Paper()
        self._worker = Worker(
            NODE, [lambda calls: self._paper], functions=(_BODY, _HEAD, _DRAW), limits=limits
        )
        self._worker.start()
        one = (1,)  # only outputs are counted: what stays from step to step may be of any size
        self._weights, self._cache, self._inputs, self._tokens = (
            self._worker.malloc(one, torch.uint8) for _ in range(4)
        )
        self._message = torch.zeros(one, dtype=torch.uint8)
        self._shapes: set[tuple[int, int, int]] = set()

    @classmethod
    def of(cls, config: EngineConfig, model: Sizes, dtype: str) -> StepGraph:
        """Make one with the limits of the settings; `dtype` is torch's name of it (`float32`)."""
        own = config.worker
        # Nothing of a step ends before all of it is there: waiting makes no room.
        limits = Limits.parse(own.ring_heap, own.ring_task_window, own.ring_dep_pool, timeout=0.0)
        return cls(limits, model.hidden_size, model.vocab_size, getattr(torch, dtype))

    def rings(self) -> dict[str, dict[str, list[int]]]:
        """Return the limits of each resource, and the most that a step took of it, by ring."""
        limits = self._worker.limits
        return {
            resource: {"limit": list(limits.of(resource)), "high_water": marks}
            for resource, marks in self._worker.high_water.items()
        }

    def admit(self, items: Sequence[BatchItem]) -> None:
        """Let a step pass, or raise the CapacityError of a ring that is too small for it."""
        tokens = drawing = scored = 0
        for item in items:
            tokens += len(item.token_ids)
            drawing += item.sampling is not None
            scored = max(scored, len(item.prompt_targets))
        shape = (tokens, drawing, min(scored, HEAD_ROWS))
        if shape in self._shapes:
            return
        with self._worker.orchestrate(), self._paper.held():
            self._record(*shape)
        if len(self._shapes) == _MOST_SHAPES:
            self._shapes.clear()
        self._shapes.add(shape)

    def _record(self, tokens: int, drawing: int, scored: int) -> None:
        worker = self._worker
        worker.copy_to(self._inputs, self._message)
        hidden = worker.submit_next_level(
            _BODY,
            TaskArgs(
                weights=self._weights,
                inputs=self._inputs,
                cache=self._cache,
                hidden=Allocate((tokens, self._hidden), self._dtype),
            ),
        )["hidden"]
        if scored:
            with worker.scope():
                self._draw(hidden, scored)
        if drawing:
            self._draw(hidden, drawing)

    def _draw(self, hidden: Handle, rows: int) -> None:
        worker, logits = self._worker, Allocate((rows, self._vocab), self._dtype)
        args = TaskArgs(weights=self._weights, inputs=self._inputs, hidden=hidden, logits=logits)
        made = worker.submit_next_level(_HEAD, args)["logits"]
        worker.submit_next_level(_DRAW, TaskArgs(inputs=self._inputs, logits=made, tokens=self._tokens))
        worker.copy_from(self._tokens, self._message)


class _Paper:
    """An endpoint on which nothing happens, and nothing is done while it is held."""

    name = "step"
    generation = 0

    def __init__(self) -> None:
        self._ids = count(1)
        self._open: list[Future[None]] | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let tasks wait for each other in the body, so that their edges are seen."""
        self._open = []
        try:
            yield
        finally:
            waiting, self._open = self._open, None
            for future in waiting:
                future.set_result(None)

    def malloc(self, nbytes: int) -> int:
        """See Endpoint."""
        return next(self._ids)

    def free(self, buffer: int) -> None:
        """See Endpoint."""

    def copy_to(self, target: Region, source: torch.Tensor) -> Future[None]:
        """See Endpoint."""
        return self._future()

    def copy_from(self, source: Region, target: torch.Tensor) -> Future[None]:
        """See Endpoint."""
        return self._future()

    def run(self, digest: str, arguments: Sequence[Scalar | Region]) -> Future[None]:
        """See Endpoint."""
        return self._future()

    def close(self, deadline: float) -> None:
        """See Endpoint."""

    def _future(self) -> Future[None]:
        future: Future[None] = Future()
        if self._open is None:
            future.set_result(None)
        else:
            self._open.append(future)
        return future


def _nothing(*_: object) -> None:
    """The tasks are run elsewhere, all in one call."""


def _function(name: str, **tags: Tag) -> Function:
    parameters = [Parameter(parameter, tag) for parameter, tag in tags.items()]
    return Function.with_parameters(name, _nothing, parameters, f"the step's {name}")


_BODY = _function("body", weights=Tag.INPUT, inputs=Tag.INPUT, cache=Tag.INOUT, hidden=Tag.OUTPUT)
_HEAD = _function("head", weights=Tag.INPUT, inputs=Tag.INPUT, hidden=Tag.INPUT, logits=Tag.OUTPUT)
_DRAW = _function("draw", inputs=Tag.INPUT, logits=Tag.INPUT, tokens=Tag.OUTPUT_EXISTING)
