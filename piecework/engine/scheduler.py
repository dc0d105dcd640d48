"""The scheduler: which tokens of which requests run in the next step.

Each step takes one token of every request that decodes, then chunks of prompts, up to the token budget.
A request gets pages for all its known tokens when it is admitted, and page by page while it decodes.
When no page is free, the youngest request gives up its pages and waits again (preemption by recompute).

With prefix caching, a request begins behind the full pages that the tree knows of its tokens; its last
token is always computed, since that gives the next one. Where a running request is about to compute the next
page that a waiting one lacks, the latter waits for it.

Over a static cache a page is a slot, which has room for the longest request: see sessions.py.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from piecework.config import SchedulerConfig
from piecework.engine.request import Request
from piecework.engine.sessions import Sessions
from piecework.kvcache import Node, PagePool, PrefixTree, pages_for
from piecework.runner.batch import BatchItem, Span


class Scheduled(NamedTuple):
    """A request and the tokens of it that run in this step; `draws`: up to the last known one, so that the
    next is drawn.
    """

    request: Request
    span: Span
    draws: bool

    @property
    def awaited(self) -> bool:
        """True where the request takes what it gives, next; not once it ended or was preempted."""
        in_flight = self.request.in_flight
        return bool(in_flight) and in_flight[0] is self

    def item(self, before: int | None = None) -> BatchItem:
        """The runner's view of it; `before` is the request's place in the step in flight, if any."""
        request, span = self.request, self.span
        targets: Sequence[int] = ()
        if request.params.prompt_logprobs is not None and not request.prompt_logprobs_sent:
            targets = request.prompt_ids[span.start + 1 : span.stop + 1]
        coming = request.coming > 0
        return BatchItem(
            token_ids=(0,) if coming else request.tokens(span.start, span.stop),
            span=span,
            pages=request.pages,
            sampling=request.sampling_state() if self.draws else None,
            prompt_targets=targets,
            prompt_top=request.params.prompt_logprobs or 0,
            follows=before if coming else None,
        )


class Scheduler:
    """Holds the waiting and the running requests, all of them in the order in which they were added.

    That order holds by itself: the oldest that waits is the next to run, and the youngest that runs is the
    one that waits again. Both are linked, so that a request is taken out of the middle of a long queue as
    fast as out of a short one.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: PagePool,
        page_size: int,
        *,
        prefix_caching: bool = False,
        static: bool = False,
    ) -> None:
        self._config = config
        self._page_size = page_size
        self._prefix_caching = prefix_caching
        self.tree = PrefixTree(pool, page_size)  # without prefix caching nothing enters it
        self.sessions = Sessions(pool) if static else None
        self.waiting: OrderedDict[Request, None] = OrderedDict()
        self.running: OrderedDict[Request, None] = OrderedDict()
        self.preemptions = 0

    @property
    def has_work(self) -> bool:
        """True while any request waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self.waiting[request] = None

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is, and free its pages."""
        self.running.pop(request, None)
        self.waiting.pop(request, None)
        self._release(request)
        request.in_flight.clear()

    def keep(self, request: Request) -> None:
        """Make what a step computed of a request known to others."""
        if self._prefix_caching and self.sessions is None:
            branch = request.branch or self.tree.root
            request.branch = self.tree.extend(branch, request.tokens, request.pages, request.computed)

    def shrink_to(self, most: int) -> None:
        """Have at most `most` pages in use: idle ones are given up, then the youngest requests wait again."""
        while self.running and self.tree.held > most:
            self._preempt(next(reversed(self.running)))
        self.tree.evict(most)

    def renumber(self, moves: Mapping[int, int]) -> None:
        """Take over the new numbers of pages; see `PagePool.resize`."""
        for request in self.running:
            request.pages = array("i", (moves.get(page, page) for page in request.pages))
        self.tree.renumber(moves)

    def page_holders(self) -> Iterator[Iterable[int]]:
        """Yield the pages of each that has some."""
        for request in (*self.running, *self.waiting):
            yield request.pages
        yield (node.page for node in self.tree.nodes())

    def distrust(self, request: Request) -> None:
        """Let nobody use what a request has read or computed: there is something wrong with it."""
        self.tree.forget(request.pages)
        self.lose(request)

    def lose(self, request: Request) -> None:
        """Keep nothing of a request whose step failed: its slot may be half written."""
        if self.sessions is not None:
            self.sessions.forget(request.pages)

    def schedule(self) -> list[Scheduled]:
        """Choose the next step; decoding requests come first, in order of arrival."""
        step: list[Scheduled] = []
        reading: list[Request] = []
        running, preemptions = self.running, self.preemptions
        coming: set[tuple[Node, bytes]] = set()
        for request in list(running):
            if request.in_flight and self.waiting:
                coming |= self._next_page(request)
            if request.in_flight and request.last_is_coming:
                continue
            if request.remaining > 1:
                reading.append(request)
            elif request in running and self._grow(request):
                step.append(Scheduled(request, Span(request.begun, 1), True))
        if self.preemptions > preemptions:  # a later one may have taken the pages of one that was chosen
            step = [s for s in step if s.request in running]
            reading = [request for request in reading if request in running]
        budget = self._config.max_num_batched_tokens - len(step)
        for request in reading:
            if budget > 0:
                budget -= self._add_chunk(step, request, budget)
            if self.waiting:
                coming |= self._next_page(request)
        while budget > 0 and self.waiting and len(running) < self._config.max_num_seqs:
            request = next(iter(self.waiting))
            if not self._admit(request, coming):
                break
            del self.waiting[request]
            request.mark_scheduled()
            running[request] = None
            budget -= self._add_chunk(step, request, budget)
            coming |= self._next_page(request)
        return step

    def _admit(self, request: Request, coming: set[tuple[Node, bytes]]) -> bool:
        """Give a request pages for all known tokens, if that leaves one for each running one to grow into."""
        tree, node = self.tree, self.tree.root
        if self.sessions is not None:
            return self._admit_to_slot(self.sessions, request)
        if self._may_reuse(request):
            node = request.branch = tree.find(request.branch, request.tokens, self._most_known(request))
            if coming and not coming.isdisjoint(self._next_page(request)):
                return False
        fresh = pages_for(request.num_tokens, self._page_size) - node.depth
        spare = len(self.running)
        if tree.available < fresh + spare:
            return False
        known = tree.take(node)  # which may leave fewer
        pages = tree.allocate(fresh) if tree.available >= fresh + spare else None
        if pages is None:
            tree.release(known)
            return False
        request.pages.extend(known + pages)
        if request.cached_tokens is None:
            request.cached_tokens = len(known) * self._page_size
        if known:
            request.computed = len(known) * self._page_size
            tree.hits += 1
            tree.hit_tokens += request.computed
        return True

    def _admit_to_slot(self, sessions: Sessions, request: Request) -> bool:
        admitted = sessions.admit(request, reuse=self._may_reuse(request))
        if request.computed:
            self.tree.hits += 1
            self.tree.hit_tokens += request.computed
        return admitted

    def _may_reuse(self, request: Request) -> bool:
        """Log probabilities of a prompt need all of its rows."""
        wants_rows = request.params.prompt_logprobs is not None and not request.prompt_logprobs_sent
        return self._prefix_caching and not wants_rows

    def _most_known(self, request: Request) -> int:
        return (request.num_tokens - 1) // self._page_size

    def _next_page(self, request: Request) -> set[tuple[Node, bytes]]:
        """The node and the edge of the first page that a request lacks, if its tokens fill that."""
        node = request.branch or self.tree.root
        if not self._prefix_caching or node.depth >= self._most_known(request):
            return set()
        return {(node, self.tree.key(node, request.tokens))}

    def _add_chunk(self, step: list[Scheduled], request: Request, budget: int) -> int:
        remaining = request.remaining
        length = min(remaining, self._config.chunk_size, budget)
        step.append(Scheduled(request, Span(request.begun, length), length == remaining))
        return length

    def _grow(self, request: Request) -> bool:
        """Give a decoding request the page of its next token; False where it was preempted itself."""
        while len(request.pages) * self._page_size <= request.begun:
            pages = self.tree.allocate(1)
            if pages is not None:
                request.pages = request.pages + array("i", pages)  # a step in flight may read the old ones
                continue
            victim = next(reversed(self.running))
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def restart(
        self,
        pool: PagePool,
        page_size: int,
        *,
        static: bool = False,
        carried: Collection[int] = (),
    ) -> dict[int, int]:
        """Go on with another cache, in which there is nothing: what ran is computed again, first of all.

        Requests go on running where the contents of their pages are all among the `carried` ones, of the same
        size, and `pool` has room, the oldest first. Returns the new pages of those by the old ones.
        """
        running, moves = list(self.running), dict[int, int]()
        kept = 0
        while kept < len(running) and self._move(running[kept], pool, carried, moves):
            kept += 1
        for request in reversed(running[kept:]):
            self._wait_again(request)
        self._page_size = page_size
        self.tree.restart(pool, page_size)
        self.sessions = Sessions(pool) if static else None
        return {old: new for old, new in moves.items() if old in carried}

    def _move(
        self, request: Request, pool: PagePool, carried: Collection[int], moves: dict[int, int]
    ) -> bool:
        """Give a request that runs pages of another pool, if that has so many."""
        written = request.pages[: pages_for(request.computed, self._page_size)]
        fresh = [page for page in request.pages if page not in moves]
        if not carried or not all(page in carried for page in written) or pool.free < len(fresh):
            return False
        pool.share(moves[page] for page in request.pages if page in moves)
        new = pool.allocate(len(fresh))
        assert new is not None, "there is room"
        moves.update(zip(fresh, new, strict=True))
        request.pages = array("i", (moves[page] for page in request.pages))
        request.branch = None
        return True

    def _preempt(self, request: Request) -> None:
        self._wait_again(request)
        self.preemptions += 1

    def _wait_again(self, request: Request) -> None:
        del self.running[request]
        self._release(request)
        request.computed = 0
        request.in_flight.clear()
        if not request.prompt_logprobs_sent:
            request.prompt_logprobs.clear()
        self.waiting[request] = None
        self.waiting.move_to_end(request, last=False)

    def _release(self, request: Request) -> None:
        if self.sessions is not None:
            self.sessions.release(request, keep=self._prefix_caching)
        self.tree.release(request.pages)
        request.pages = array("i")
        request.branch = None
