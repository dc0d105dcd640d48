"""Prefix reuse under any load: each page holds what its readers take it for, and comes back once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler import PAGE, make_request

from piecework.config import SchedulerConfig
from piecework.engine.request import Request
from piecework.engine.scheduler import Scheduler
from piecework.kvcache import PagePool, pages_for
from piecework.sampling import SamplingParams


@dataclass
class Load:
    prompts: list[tuple[int, list[int], int]]  # (step of arrival, prompt, output tokens)
    pages: int
    chunk: int
    seqs: int
    wants_rows: set[int]  # requests that ask for log probabilities of their prompt
    cancelled: dict[int, int]  # step -> request
    distrusted: set[int]  # steps at whose end a request turns out wrong
    cleared: set[int]


@st.composite
def loads(draw: st.DrawFn) -> Load:
    """Prompts that share beginnings, in pools that hold few of them."""
    stems = draw(st.lists(st.lists(st.integers(0, 2), max_size=20), min_size=1, max_size=3))
    tails = st.lists(st.integers(0, 2), min_size=1, max_size=12)
    prompt = st.builds(lambda stem, tail: stem + tail, st.sampled_from(stems), tails)
    item = st.tuples(st.integers(0, 12), prompt, st.integers(1, 12))
    prompts = sorted(draw(st.lists(item, min_size=1, max_size=12)), key=lambda p: p[0])
    largest = max(pages_for(len(p) + o, PAGE) for _, p, o in prompts)
    numbers = st.integers(0, len(prompts) - 1)
    return Load(
        prompts,
        draw(st.integers(largest + 1, largest + 14)),
        draw(st.sampled_from([1, 3, 8, 64])),
        draw(st.integers(1, 6)),
        draw(st.sets(numbers, max_size=2)),
        draw(st.dictionaries(st.integers(1, 20), numbers, max_size=3)),
        draw(st.sets(st.integers(1, 20), max_size=2)),
        draw(st.sets(st.integers(1, 20), max_size=1)),
    )


@dataclass
class Run:
    """Drives a scheduler and keeps a memory of pages beside it, as the KV cache of a model would be."""

    load: Load
    memory: dict[int, dict[int, tuple[int, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        load = self.load
        self.pool = PagePool(load.pages)
        config = SchedulerConfig(
            max_num_seqs=load.seqs, max_num_batched_tokens=load.seqs + 20, chunk_size=load.chunk
        )
        self.scheduler = Scheduler(config, self.pool, PAGE, prefix_caching=True)
        self.requests = []
        for number, (_, prompt, output) in enumerate(load.prompts):
            request = make_request(number, 1, output)
            request.prompt_ids, request.num_tokens = tuple(prompt), len(prompt)
            if number in load.wants_rows:
                request.params = SamplingParams(prompt_logprobs=0)
            self.requests.append(request)

    def __call__(self) -> None:
        scheduler, added = self.scheduler, 0
        for now in range(2000):
            while added < len(self.requests) and self.load.prompts[added][0] <= now:
                scheduler.add(self.requests[added])
                added += 1
            if not scheduler.has_work and added == len(self.requests):
                break
            step = scheduler.schedule()
            assert step or not scheduler.has_work, "work waits but nothing runs"
            self.check_owners()
            for scheduled in step:
                self.check_known(scheduled.request, scheduled.span.start)
            for scheduled in step:
                self.write(scheduled.request, scheduled.span.start, scheduled.span.stop)
            for scheduled in step:
                request = scheduled.request
                request.computed = scheduled.span.stop
                if now in self.load.distrusted and request is step[0].request:
                    scheduler.distrust(request)
                    self.end(request)
                    continue
                scheduler.keep(request)
                if scheduled.draws:
                    # What comes depends on all tokens, and often repeats: outputs share pages too.
                    request.accept(sum(request.tokens(0, request.num_tokens)) % 2, None)
                    if request.finished:
                        scheduler.remove(request)
            if now in self.load.cleared:
                scheduler.tree.clear()
            if now in self.load.cancelled and self.load.cancelled[now] < added:
                self.end(self.requests[self.load.cancelled[now]])
        assert all(r.finished for r in self.requests)
        assert self.pool.used == len(scheduler.tree) == scheduler.tree.idle
        scheduler.tree.clear()
        assert self.pool.used == 0

    def end(self, request: Request) -> None:
        if not request.finished:
            request.end("abort")
            self.scheduler.remove(request)

    def check_owners(self) -> None:
        """Each page has as many references as owners, and is free if it has none."""
        tree = self.scheduler.tree
        owners = Counter(page for request in self.requests for page in request.pages)
        for node in tree.nodes():
            owners[node.page] += 1
        assert all(len(set(r.pages)) == len(r.pages) for r in self.requests)
        for page in range(1, self.load.pages):
            assert self.pool.references(page) == owners[page]
        assert self.pool.free == self.load.pages - 1 - len(owners)
        assert tree.idle == sum(owners[node.page] == 1 for node in tree.nodes())

    def check_known(self, request: Request, computed: int) -> None:
        """The pages hold what was computed for exactly these tokens, each behind those before it."""
        assert request.computed == computed < request.num_tokens
        wants_rows = request.params.prompt_logprobs is not None and not request.prompt_logprobs_sent
        assert not (wants_rows and request.cached_tokens)
        for position in range(computed):
            page = request.pages[position // PAGE]
            assert self.memory[page][position % PAGE] == tuple(request.tokens(0, position + 1))

    def write(self, request: Request, start: int, stop: int) -> None:
        for position in range(start, stop):
            page = request.pages[position // PAGE]
            self.memory.setdefault(page, {})[position % PAGE] = tuple(request.tokens(0, position + 1))


@settings(max_examples=150, deadline=None)
@given(loads())
def test_any_load_reads_what_it_would_have_computed(load: Load) -> None:
    Run(load)()


def test_the_mode_is_on_and_pages_are_evicted() -> None:
    stem = [1] * 16
    prompts = [(i, [*stem, i % 3], 4) for i in range(8)]
    run = Run(Load([*prompts, (40, [2] * 30, 8)], 11, 8, 4, set(), {}, set(), set()))
    run()
    tree = run.scheduler.tree
    assert tree.hits >= 7 and tree.evictions > 0
    assert [r.cached_tokens for r in run.requests] == [0, *[16] * 7, 0]


def test_one_reads_a_prompt_and_the_others_wait_for_its_pages() -> None:
    """Eight of a kind that come at once: the beginning is computed once, a chunk a step."""
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, chunk_size=8)
    scheduler = Scheduler(config, PagePool(100), PAGE, prefix_caching=True)
    requests = [make_request(number, 25, 4) for number in range(8)]
    for request in requests:
        scheduler.add(request)
    lengths = []
    for _ in range(5):
        step = scheduler.schedule()
        lengths.append([scheduled.span.length for scheduled in step])
        for scheduled in step:
            scheduled.request.computed = scheduled.span.stop
            scheduler.keep(scheduled.request)
            if scheduled.draws:
                scheduled.request.accept(1, None)
    assert lengths == [[8], [8], [8], [1] * 8, [1] * 8]
    scheduler.remove(requests[0])
    assert requests[1].cached_tokens == 24


def test_who_waits_for_a_reader_goes_on_when_that_is_cancelled() -> None:
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, chunk_size=8)
    scheduler = Scheduler(config, PagePool(100), PAGE, prefix_caching=True)
    requests = [make_request(number, 25, 4) for number in range(2)]
    for request in requests:
        scheduler.add(request)
    (first,) = scheduler.schedule()
    scheduler.remove(first.request)
    (second,) = scheduler.schedule()
    assert second.request is requests[1] and second.span == (0, 8)
