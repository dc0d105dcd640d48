"""The runner: a model's programs and KV cache on one device, and how a step runs there."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from piecework import debug
from piecework.capture.runner import GraphRunner
from piecework.devices.base import Phase
from piecework.kvcache import PagedKVCache, StaticKVCache
from piecework.profile import Profile, now
from piecework.runner.batch import BatchItem, ItemResult, build_inputs
from piecework.runner.programs import Programs
from piecework.runner.ranks import Ranks
from piecework.runner.sampler import NonFiniteLogitsError, SamplingState, prompt_logprobs, sample
from piecework.runner.steps import LAYER, StepTeller
from piecework.runner.suspects import SuspectPages
from piecework.sampling import TokenLogprob

log = logging.getLogger("piecework.runner")

# The head runs on this many prompt rows at a time, since each row gives a vocabulary of floats.
HEAD_ROWS = 128
_NOTHING = ItemResult()


class Runner:
    """Executes batches on a model's programs and its cache. One slice of rows per item, in order."""

    def __init__(
        self,
        programs: Programs,
        cache: PagedKVCache | StaticKVCache,
        profile: Profile,
        ranks: Ranks | None = None,
    ) -> None:
        """`ranks`: the group that has the other parts of the model; only rank 0 has results."""
        self.programs = programs
        self.device = programs.device
        self.cache = cache
        self.profile = profile
        self._ranks = ranks
        self._suspects = SuspectPages(cache) if isinstance(cache, PagedKVCache) else None
        self.graphs = programs.graphs(cache)
        if programs.plan is not None and isinstance(self.graphs, GraphRunner):
            with profile.time("capture"):
                self.graphs.capture(programs.plan)
        self._counters = {"body": programs.counters, "head": programs.head_counters}
        self._closed = False
        self._teller = StepTeller(programs) if debug.level() >= LAYER else None

    def execute(self, items: Sequence[BatchItem]) -> list[ItemResult]:
        """Run one step; the result has an entry per item, in the same order."""
        return self.examine(items)[0]

    @torch.inference_mode()
    def examine(self, items: Sequence[BatchItem]) -> tuple[list[ItemResult], Tensor | None]:
        """Run one step as `execute` does, and return the logits too: a row per item that draws, [R, V].

        They may be overwritten by the next step; None where nothing is drawn.
        """
        start = now()
        phase: Phase = "decode" if all(item.span.length == 1 for item in items) else "prefill"
        with self.profile.time(f"{phase}.prepare"):
            if self._suspects is not None:
                self._suspects.clear(items)
            inputs = build_inputs(items, self.cache.page_size, self.device)
        drawing = [i for i, item in enumerate(items) if item.sampling is not None]
        with self.profile.time(f"{phase}.run"):
            hidden, logits = self.graphs.run(
                phase,
                inputs.input_ids,
                inputs.positions,
                inputs.metadata,
                [inputs.starts[i + 1] - 1 for i in drawing],
            )
            if self.device.watches_cache and isinstance(self.cache, PagedKVCache):
                pages = self.cache.num_pages
                self.device.notify("cache", 0, [t[:pages] for t in self.cache.tensors().values()])
            self.device.synchronize()
        if self._teller is not None:
            self._teller.tell(phase, len(items), inputs.input_ids.shape[0], now() - start)
        with self.profile.time(f"{phase}.sample"):
            results = [_NOTHING] * len(items)
            logits = None if logits is None else self._gather(logits)
            if logits is not None:
                states = [state for item in items if (state := item.sampling) is not None]
                for i, result in zip(drawing, draw(logits, states), strict=True):
                    results[i] = result
            for i, item in enumerate(items):
                if item.prompt_targets:
                    start = inputs.starts[i]
                    rows = hidden[start : start + len(item.prompt_targets)]
                    try:
                        scored = self._score(rows, item.prompt_targets, item.prompt_top)
                    except NonFiniteLogitsError as error:
                        results[i] = ItemResult(error=_not_finite(error))
                    else:
                        results[i] = results[i]._replace(prompt_logprobs=scored)
            if self._suspects is not None:
                for item, result in zip(items, results, strict=True):
                    if result.error is not None:
                        self._suspects.add(item.pages)
        return results, logits

    @property
    def dtype(self) -> str:
        """The precision that the model runs in."""
        return str(self.programs.model.dtype).removeprefix("torch.")

    @property
    def compilers(self) -> tuple[str, ...]:
        """Names of the compilers that made the body's pieces."""
        if isinstance(self.graphs, GraphRunner):
            pieces = self.programs.body.pieces
        else:
            pieces = tuple(program.piece for program in self.graphs.programs)
        return tuple(dict.fromkeys(piece.compiler for piece in pieces))

    def counters(self) -> dict[str, dict[str, int]]:
        """Return what the programs `body` and `head` counted since the start (piecework.graph.counters)."""
        return {name: counters.snapshot() for name, counters in self._counters.items()}

    def close(self) -> None:
        """Give graphs, cache and weights back to the device; a second call does nothing.

        The runner can't be used after that.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self.graphs.release()
        except Exception as error:  # of a device that is lost; what it held is lost, too
            log.info("the graphs of %s can't be released: %s", self.device.name, error)
        del self.graphs, self.cache, self.programs
        gc.collect()  # graphs of modules refer to each other

    def _score(self, rows: Tensor, targets: Sequence[int], top: int) -> list[TokenLogprob]:
        scored: list[TokenLogprob] = []
        bad: NonFiniteLogitsError | None = None
        for start in range(0, len(targets), HEAD_ROWS):
            part = slice(start, start + HEAD_ROWS)
            logits = self._gather(self.graphs.head(rows[part]))  # also once one is bad: other ranks join in
            if logits is not None and bad is None:
                try:
                    scored += prompt_logprobs(logits, list(targets[part]), top)
                except NonFiniteLogitsError as error:
                    bad = error
        if bad is not None:
            raise bad
        return scored

    def _gather(self, logits: Tensor) -> Tensor | None:
        """Return logits of the whole vocabulary, None where another rank gets them."""
        if self._ranks is None:
            return logits
        return self._ranks.gather(logits, self.programs.model.config.vocab_size)


def draw(logits: Tensor, states: Sequence[SamplingState]) -> list[ItemResult]:
    """Draw a token per row of logits [R, V]; a row that isn't finite gets an error, the others go on."""
    bad: dict[int, str] = {}
    try:
        sampled = sample(logits, states)
    except NonFiniteLogitsError as error:
        bad = dict.fromkeys(error.rows, _not_finite(error))
        good = [row for row in range(len(states)) if row not in bad]
        sampled = sample(logits[good], [states[row] for row in good])
    drawn = map(ItemResult, sampled.token_ids, sampled.logprobs)
    if not bad:
        return list(drawn)
    return [ItemResult(error=bad[row]) if row in bad else next(drawn) for row in range(len(states))]


def _not_finite(error: NonFiniteLogitsError) -> str:
    return f"the model's logits are not finite ({error})"
