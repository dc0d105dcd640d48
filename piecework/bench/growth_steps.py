"""Decode steps of an engine of their own, one by one, and how long each of their parts takes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import median

from piecework.bench.offline import Check, compare
from piecework.engine.admission import Admission
from piecework.engine.engine import Engine
from piecework.engine.outputs import Delta
from piecework.engine.request import Request
from piecework.engine.service import Service
from piecework.errors import ConfigError, EngineDeadError
from piecework.profile import now
from piecework.sampling import SamplingParams

PARTS = {
    "schedule": "schedule",
    "prepare": "decode.prepare",
    "model": "decode.run",
    "sample": "decode.sample",
    "results": "results",
}
"""The parts of a step in order, and their timers; what is left of it is `rest`."""
WARMUP = 2
_CHECKED_TOKENS = 8


class Steps:
    """Runs requests on the runner of a service whose own engine has nothing to do, in this thread.

    A request is taken in as if its prompt had been read: pages hold one number everywhere, which costs a
    step as much as any other. The service's profile must be on.
    """

    def __init__(self, service: Service, seed: int) -> None:
        self._service = service
        self.engine = Engine(service.runner, service.config)
        self._admission = Admission(service.model_config, service.tokenizer, (), service.max_model_len)
        self._random = random.Random(seed)
        self._made = 0
        self._deltas: list[Delta] = []
        for tensor in service.runner.cache.tensors().values():
            tensor.fill_(0.01)  # memory that was never written to is none yet

    def request(self, prompt: Sequence[int], max_tokens: int | None = None, computed: int = 0) -> Request:
        """Make a greedy request of which `computed` tokens count as read; `add` it to the engine."""
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self._made += 1
        name = str(self._made)
        (request,) = self._admission.requests(name, prompt, params, 0, self._deltas.append)
        request.computed = computed
        return request

    def prompt(self, length: int) -> list[int]:
        """Random token ids."""
        return [self._random.randrange(self._service.model_config.vocab_size) for _ in range(length)]

    def start(self, rows: int, length: int) -> list[Request]:
        """Let so many requests run that have `length` tokens at the next step, and nothing else."""
        self.engine.end_all("abort")
        requests = [self.request(self.prompt(length), computed=length - 1) for _ in range(rows)]
        for request in requests:
            self.engine.add(request)
        return requests

    def timed(self, rows: int, steps: int) -> dict[str, float]:
        """Run steps of `rows` requests; returns medians in ms: `step_ms`, and each part as `<part>_ms`."""
        taken: dict[str, list[float]] = {name: [] for name in ("step", *PARTS, "rest")}
        profile = self._service.profile
        for number in range(WARMUP + steps):
            profile.reset()
            self._deltas.clear()
            begin = now()
            self.engine.step()
            whole = (now() - begin) * 1e3
            self._check_rows(rows)
            if number < WARMUP:
                continue
            timers = profile.snapshot()["timers"]
            parts = {name: timers[timer]["total_ms"] for name, timer in PARTS.items()}
            for name, ms in {"step": whole, **parts, "rest": whole - sum(parts.values())}.items():
                taken[name].append(ms)
        return {f"{name}_ms": median(times) for name, times in taken.items()}

    def check(self, count: int, length: int) -> Check:
        """Compare the tokens of prompts that run together with those that each of them gives alone."""
        prompts = [self.prompt(length) for _ in range(count)]
        alone = [tokens for prompt in prompts for tokens in self._run([prompt])]
        return compare(alone, self._run(prompts))

    def _run(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        self.engine.end_all("abort")
        requests = [self.request(prompt, _CHECKED_TOKENS) for prompt in prompts]
        for request in requests:
            self.engine.add(request)
        while self.engine.has_work:
            self.engine.step()
        return [request.output_ids for request in requests]

    def _check_rows(self, rows: int) -> None:
        failed = next((delta.error for delta in self._deltas if delta.error is not None), None)
        if failed is not None:
            raise EngineDeadError(failed)
        if len(self._deltas) != rows:
            config, running = self._service.config, len(self.engine.scheduler.running)
            if running == config.scheduler.max_num_seqs or len(self._deltas) < running:
                name, value = "max_num_seqs", config.scheduler.max_num_seqs
                raise ConfigError(name, value, f"at least {rows}, as max_num_batched_tokens, for this table")
            pages = self._service.runner.cache.num_pages
            raise ConfigError("num_pages", pages, f"as many as {rows} requests of this table need")
