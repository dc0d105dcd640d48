"""The engine: takes requests, runs steps, and tells each request's listener what it gained.

`step` is the whole loop: schedule, execute, advance. The engine belongs to one thread; `Service` puts it
behind a thread-safe door.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from piecework.config import EngineConfig
from piecework.engine.carry import Carried, pack, unpack
from piecework.engine.flights import Flights
from piecework.engine.gaps import Gaps
from piecework.engine.outputs import Delta, EngineStats
from piecework.engine.request import Request
from piecework.engine.resize import KVSize, Resizer
from piecework.engine.scheduler import Scheduled, Scheduler
from piecework.kvcache import Capacities, PagePool
from piecework.runner.batch import ItemResult
from piecework.workers.serving.runner import StepRunner
from piecework.workers.serving.step_graph import StepGraph

log = logging.getLogger("piecework.engine")


Successor = Callable[[Exception], "tuple[StepRunner, Carried] | None"]
"""successor(error) is the runner that takes over, with what was carried from the cache of the one before."""


class Engine:
    """Runs requests on a runner. Every request that is added ends exactly once, with a reason."""

    def __init__(
        self,
        runner: StepRunner,
        config: EngineConfig,
        successor: Successor = lambda error: None,
        graph: StepGraph | None = None,
    ) -> None:
        """Begin without requests.

        `successor` is asked when a step fails: for the runner that takes over, or None where the failure is
        not one that another runner could do better; it raises where there is none left. `graph` refuses
        steps that are too large for its limits.
        """
        self._successor = successor
        self._flights = Flights(
            runner,
            graph.admit if graph is not None else lambda items: None,
            overlap=config.scheduler.async_scheduling,
        )
        self._use(runner)
        self.scheduler = Scheduler(
            config.scheduler,
            self.pool,
            self._page_size,
            prefix_caching=config.cache.prefix_caching,
            static=self._slot_room is not None,
        )
        self._debug = config.compilation_config.enable_debug_mode
        self.on_finish: Callable[[Request, Delta], None] = lambda request, delta: None
        self._requests: dict[str, dict[int, Request]] = {}  # by id, then by the sample's index
        self.gaps = Gaps(config.device.max_failover_seconds)
        self._steps = self._overlapped = 0
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._total = 0
        self._finished: Counter[str] = Counter()

    @property
    def has_work(self) -> bool:
        """True while any request is not ended, or a step in flight."""
        return self.scheduler.has_work or bool(self._flights)

    def is_open(self, request_id: str) -> bool:
        """True while any sample of the request has not ended."""
        return request_id in self._requests

    def add(self, request: Request) -> None:
        """Queue a request; its id and index must not be in use."""
        samples = self._requests.setdefault(request.request_id, {})
        assert request.index not in samples, f"request {request.request_id} is already there"
        samples[request.index] = request
        self._total += 1
        self._prompt_tokens += len(request.prompt_ids)
        self.scheduler.add(request)
        self._end_if_too_long(request)

    def abort(self, request_id: str) -> None:
        """End all samples of a request as aborted; an unknown or ended id is nothing to do."""
        for request in list(self._requests.get(request_id, {}).values()):
            self._end(request, request.end("abort"))

    def end_all(self, reason: str, error: str | None = None) -> None:
        """End every request, for example when the engine stops."""
        for request in [one for samples in self._requests.values() for one in samples.values()]:
            self._end(request, request.end(reason, error))

    def lose_cache(self, error: str) -> None:
        """End every request that has pages: what was in them is gone. Those that wait go on waiting."""
        self._flights.void()
        for request in list(self.scheduler.running):
            self.scheduler.lose(request)
            self._end(request, request.end("error", error))
        self.scheduler.tree.clear()

    def step(self) -> bool:
        """Send the next step, and take the results of the oldest in flight where it is time to.

        Returns whether it took some. When it raises, the requests that were part of that step have ended
        with an error. A CapacityError is one of such a step alone: nothing ran, and smaller steps will.
        Where another runner takes over, the step never happened, and the next one starts to compute again.
        In debug mode PageError is raised where a page has other holders than are counted.
        """
        self.end_overdue()
        sent = not self._flights.full and self._send()
        landing = bool(self._flights) and (self._flights.full or not sent)
        if landing:
            self._land()
        return landing

    def land_all(self) -> None:
        """Take the results of all steps in flight; raises as `step` does."""
        while self._flights:
            self._land()

    def close(self) -> None:
        """Wait for the steps in flight, whose results nobody gets, and run none any more."""
        self._flights.close()

    def _send(self) -> bool:
        """Schedule and send a step; False where there is nothing to run."""
        with self._runner.profile.time("schedule"):
            step = self.scheduler.schedule()
            items = self._flights.items(step)
        if step:
            self._flights.send(step, items)
        return bool(step)

    def _land(self) -> None:
        """Wait for the oldest step and take its results; raises as `step` does."""
        since = self._flights.running_since
        self._steps += 1
        self._overlapped += self._flights.oldest.overlapped
        try:
            step, results = self._flights.wait()  # nothing here holds the runner, which may be let go now
        except Exception as error:
            self._step_failed(self._flights.failed(), error, since)
            return
        self._flights.landed()
        with self._runner.profile.time("results"):
            for scheduled, result in zip(step, results, strict=True):
                self._take(scheduled, result)
        if self._debug:
            self.pool.check(self.scheduler.page_holders())

    def kv_size(self, longest: int) -> KVSize:
        """Return how many pages the KV cache has, and can have where `longest` tokens must fit."""
        return self._resizer.size(longest)

    def resize_kv(self, pages: int, longest: int) -> KVSize:
        """Have `pages` pages, in which `longest` tokens and each open request alone must fit; see `Resizer`.

        An open request may be longer than what is admitted now, where another device took over.
        """
        self.land_all()
        open_ones = (one for samples in self._requests.values() for one in samples.values())
        lengths = (len(request.prompt_ids) + request.max_tokens for request in open_ones)
        return self._resizer.resize(pages, max((longest, *lengths)))

    @property
    def _resizer(self) -> Resizer:
        cache: Any = self._runner.cache  # one in a process of its own says that it keeps its size
        return Resizer(cache, self.pool, self.scheduler, self._runner.profile)

    def stats(self) -> EngineStats:
        """Return gauges and counters as they are now."""
        tree = self.scheduler.tree
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            kv_pages_total=self.pool.usable,
            kv_pages_used=self.pool.used - tree.idle,
            kv_pages_cached=tree.idle,
            requests_total=self._total,
            prompt_tokens_total=self._prompt_tokens,
            generation_tokens_total=self._generated_tokens,
            preemptions_total=self.scheduler.preemptions,
            prefix_hits_total=tree.hits,
            prefix_cached_tokens_total=tree.hit_tokens,
            prefix_evictions_total=tree.evictions,
            steps_total=self._steps,
            overlapped_steps_total=self._overlapped,
            finished=dict(self._finished),
            kv_moved_bytes=dict(self._kv_moved),
        )

    def end_overdue(self) -> None:
        """End the requests that wait too long for a device to take over from one that failed."""
        for request in self.gaps.overdue():
            self._end(request, request.end("error", self.gaps.error(request)))

    def _step_failed(self, served: Sequence[Request], error: Exception, began: float) -> None:
        interrupted = self.gaps.begin(self.scheduler.running, began)
        try:
            found = self._successor(error)
            if found is None:
                raise error
        except Exception as final:
            self.gaps.give_up(interrupted)
            for request in (request for request in served if not request.finished):
                self.scheduler.lose(request)
                self._end(request, request.end("error", f"the step failed: {final}"))
            raise
        self.gaps.took_over()
        self.take_over(*found)

    def _use(self, runner: StepRunner) -> None:
        """Run steps on `runner`; what is asked of its cache is kept, since one that was given up has none."""
        self._runner, cache = runner, runner.cache
        self.pool, self._page_size = PagePool(cache.num_pages), cache.page_size
        capacities = getattr(cache, "capacities", None)
        self._slot_room = capacities.longest if isinstance(capacities, Capacities) else None
        self._kv_moved: Mapping[str, int] = getattr(cache, "moved_bytes", {})

    def pack(self, doubt: str | None) -> Carried:
        """Read from the cache in use what running requests need to go on elsewhere; see `carry.pack`.

        The steps in flight land first.
        """
        self.land_all()
        return pack(self.scheduler, self._runner, doubt)

    def take_over(self, runner: StepRunner, carried: Carried) -> None:
        """Go on with another runner, whose cache is empty: what runs is computed again, or carried there."""
        self._flights.use(runner)
        self._use(runner)
        for request in [one for samples in self._requests.values() for one in samples.values()]:
            self._end_if_too_long(request)
        static = self._slot_room is not None
        self.gaps.carried(unpack(carried, self.scheduler, runner, self.pool, static=static))

    def _end_if_too_long(self, request: Request) -> None:
        """End a request that the cache can never hold: the runner that it was admitted for had more room."""
        room, prompt = self._slot_room or self.pool.usable * self._page_size, len(request.prompt_ids)
        if prompt + request.max_tokens <= room:
            return
        if request.params.max_tokens is None and prompt + len(request.output_ids) < room:
            request.max_tokens = room - prompt  # it asked for whatever fits
            return
        device = self._runner.device.name
        error = f"the device {device} took over and has room for {room} tokens; this request may need "
        self._end(request, request.end("error", error + str(prompt + request.max_tokens)))

    def _take(self, scheduled: Scheduled, result: ItemResult) -> None:
        request = scheduled.request
        if not scheduled.awaited:
            return  # it ended, or gave up its pages, after the step was sent
        request.in_flight.pop(0)
        try:
            self._advance(scheduled, result)
        except Exception as error:
            log.exception("request %s failed", request.request_id)
            self._end(request, request.end("error", f"the request failed: {error}"))

    def _advance(self, scheduled: Scheduled, result: ItemResult) -> None:
        request = scheduled.request
        request.computed = scheduled.span.stop
        if result.prompt_logprobs:
            request.prompt_logprobs.extend(result.prompt_logprobs)
        if result.error is not None:
            self.scheduler.distrust(request)
            self._end(request, request.end("error", result.error))
            return
        self.scheduler.keep(request)
        if scheduled.draws:
            assert result.token_id is not None, "a completed prompt gives a token"
            self._generated_tokens += 1
            delta = request.accept(result.token_id, result.logprob)
            if self.gaps:
                self.gaps.ended(request)
            if request.finished:
                self._end(request, delta)
            else:
                self._tell(request, delta)

    def _end(self, request: Request, delta: Delta) -> None:
        self.scheduler.remove(request)
        self.gaps.ended(request)
        samples = self._requests[request.request_id]
        del samples[request.index]
        if not samples:
            del self._requests[request.request_id]
        self._finished[delta.finish_reason or "error"] += 1
        self.on_finish(request, delta)  # first: who hears of an end finds it counted, and the id free
        self._tell(request, delta)

    def _tell(self, request: Request, delta: Delta) -> None:
        try:
            request.listener(delta)
        except BaseException:  # not even SystemExit may end the engine's thread: clients would hang
            log.exception("the listener of request %s failed", request.request_id)
            if not request.finished:
                self._end(request, request.end("abort"))
