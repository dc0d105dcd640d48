"""Logits of sequences by their token ids alone, on a runner with a KV cache of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from piecework.config import EngineConfig
from piecework.engine.request import Request
from piecework.engine.scheduler import Scheduler
from piecework.errors import PieceworkError
from piecework.kvcache import PagePool
from piecework.sampling import SamplingParams
from piecework.workers.serving.runner import StepRunner

_PARAMS = SamplingParams(temperature=0.0, max_tokens=1)


class TooLongError(PieceworkError):
    """A sequence that the reference's cache has no room for."""


class Reference:
    """What an audit asks. It finds the pages of a sequence's beginning, and computes only what came since."""

    def __init__(self, runner: StepRunner, config: EngineConfig) -> None:
        """Begin with an empty cache; nobody else may use the runner meanwhile."""
        self._runner = runner
        pool, page_size = PagePool(runner.cache.num_pages), runner.cache.page_size
        self._room = pool.usable * page_size
        self._scheduler = Scheduler(config.scheduler, pool, page_size, prefix_caching=True)

    @property
    def device(self) -> str:
        """Where it runs."""
        return self._runner.device.name

    def logits(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Return the logits [S, V] behind the last token of each sequence.

        Raises TooLongError, before anything runs, and what the runner raises; the cache is of no use then.
        """
        longest = max(map(len, sequences))
        if longest > self._room:
            raise TooLongError(f"{longest} tokens; the reference's cache has room for {self._room}")
        asked = [
            Request("audit", number, tokens, _PARAMS, 0, 1, frozenset(), _nobody, None)
            for number, tokens in enumerate(sequences)
        ]
        rows: dict[int, Tensor] = {}
        for request in asked:
            self._scheduler.add(request)
        while self._scheduler.has_work:
            step = self._scheduler.schedule()
            _, logits = self._runner.examine([scheduled.item() for scheduled in step])
            drawn = [scheduled.request for scheduled in step if scheduled.draws]
            for scheduled in step:
                scheduled.request.computed = scheduled.span.stop
                self._scheduler.keep(scheduled.request)
            for place, request in enumerate(drawn):
                assert logits is not None, "something was drawn"
                rows[request.index] = logits[place].clone()  # the next step writes there
                self._scheduler.remove(request)
        return torch.stack([rows[request.index] for request in asked])


def _nobody(_: Any) -> None:
    """Nobody listens to an audit's tokens."""
