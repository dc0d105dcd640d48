"""The scheduler: which tokens of which requests run in the next step.

Each step takes one token of every request that decodes, then chunks of prompts, up to the token budget.
A request gets pages for all its known tokens when it is admitted, and page by page while it decodes.
When no page is free, the youngest request gives up its pages and waits again (preemption by recompute).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from piecework.config import SchedulerConfig
from piecework.engine.request import Request
from piecework.kvcache import PagePool, pages_for
from piecework.runner.batch import BatchItem, Span


@dataclass(frozen=True)
class Scheduled:
    """A request and the tokens of it that run in this step."""

    request: Request
    span: Span

    @property
    def draws(self) -> bool:
        """True where the step reaches the last known token, so that the next one is drawn."""
        return self.span.stop == self.request.num_tokens

    def item(self) -> BatchItem:
        """The runner's view of it."""
        request, span = self.request, self.span
        targets: list[int] = []
        if request.params.prompt_logprobs is not None and not request.prompt_logprobs_sent:
            targets = list(request.prompt_ids[span.start + 1 : span.stop + 1])
        return BatchItem(
            token_ids=request.tokens(span.start, span.stop),
            span=span,
            pages=request.pages,
            sampling=request.sampling_state() if self.draws else None,
            prompt_targets=targets,
            prompt_top=request.params.prompt_logprobs or 0,
        )


class Scheduler:
    """Holds the waiting and the running requests, both in order of arrival."""

    def __init__(self, config: SchedulerConfig, pool: PagePool, page_size: int) -> None:
        self._config = config
        self._pool = pool
        self._page_size = page_size
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0

    @property
    def has_work(self) -> bool:
        """True while any request waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is, and free its pages."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._release(request)

    def schedule(self) -> list[Scheduled]:
        """Choose the next step; decoding requests come first, in order of arrival."""
        step: list[Scheduled] = []
        budget = self._config.max_num_batched_tokens
        for request in list(self.running):
            decoding = request.remaining == 1
            if decoding and request in self.running and self._grow(request):
                step.append(Scheduled(request, Span(request.computed, 1)))
        step = [s for s in step if s.request in self.running]  # a later one may have taken its pages
        budget -= len(step)
        for request in self.running:
            if request.remaining > 1 and budget > 0:
                budget -= self._add_chunk(step, request, budget)
        while budget > 0 and self.waiting and len(self.running) < self._config.max_num_seqs:
            request = self.waiting[0]
            pages = self._admit(request)
            if pages is None:
                break
            self.waiting.popleft()
            request.pages = pages
            request.mark_scheduled()
            self.running.append(request)
            self.running.sort(key=_arrival)
            budget -= self._add_chunk(step, request, budget)
        return step

    def _admit(self, request: Request) -> list[int] | None:
        """Pages for all known tokens, if that leaves a page for each running request to grow into."""
        needed = pages_for(request.num_tokens, self._page_size)
        if self.running and self._pool.free < needed + len(self.running):
            return None
        return self._pool.allocate(needed)

    def _add_chunk(self, step: list[Scheduled], request: Request, budget: int) -> int:
        length = min(request.remaining, self._config.chunk_size, budget)
        step.append(Scheduled(request, Span(request.computed, length)))
        return length

    def _grow(self, request: Request) -> bool:
        """Give a decoding request the page of its next token; False where it was preempted itself."""
        missing = pages_for(request.num_tokens, self._page_size) - len(request.pages)
        while missing > 0:
            pages = self._pool.allocate(missing)
            if pages is not None:
                request.pages.extend(pages)
                return True
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        request.computed = 0
        if not request.prompt_logprobs_sent:
            request.prompt_logprobs.clear()
        self.waiting.appendleft(request)
        self.preemptions += 1

    def _release(self, request: Request) -> None:
        self._pool.release(request.pages)
        request.pages = []


def _arrival(request: Request) -> tuple[float, int]:
    return request.arrival, request.index
