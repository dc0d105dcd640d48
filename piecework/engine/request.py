"""One sequence on its way through the engine."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from piecework.engine.outputs import Delta, Timing, Usage
from piecework.kvcache import Node
from piecework.profile import now
from piecework.runner.sampler import SamplingState
from piecework.sampling import SamplingParams, TokenLogprob
from piecework.tokenizer.detokenize import Detokenizer

if TYPE_CHECKING:
    from piecework.engine.scheduler import Scheduled

Listener = Callable[[Delta], None]


@dataclass(eq=False)
class Request:
    """One sample of a client's request: what was asked, what is known so far, and which pages it has.

    `branch` is the last node of the prefix tree that holds a page of it, None where it is the root, and
    `cached_tokens` are those of the prompt that it found there when it ran first.

    `num_tokens` are known, prompt and output; `computed` of them have their KV in `pages`. `in_flight` are
    its parts of steps that were sent and not taken, the oldest first; none counts once it ended or was
    preempted. A preempted request has no pages and computes its prompt and output again; what was sent stays
    sent. `max_tokens` is resolved: the request never outgrows the context.
    """

    request_id: str
    index: int
    prompt_ids: Sequence[int]
    params: SamplingParams
    seed: int
    max_tokens: int
    stop_ids: frozenset[int]
    listener: Listener
    detokenizer: Detokenizer | None
    arrival: float = field(default_factory=now)
    output_ids: list[int] = field(default_factory=list)
    pages: array[int] = field(default_factory=lambda: array("i"))
    computed: int = 0
    in_flight: list[Scheduled] = field(default_factory=list)
    branch: Node | None = None
    cached_tokens: int | None = None
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    prompt_logprobs_sent: bool = False
    finished: bool = False
    num_tokens: int = field(init=False)
    _scheduled_at: float | None = None
    _token_times: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_tokens = len(self.prompt_ids) + len(self.output_ids)

    @property
    def begun(self) -> int:
        """Tokens whose KV is computed, or will be by steps in flight."""
        return self.in_flight[-1].span.stop if self.in_flight else self.computed

    @property
    def coming(self) -> int:
        """Tokens that steps in flight will give."""
        return sum(part.draws for part in self.in_flight) if self.in_flight else 0

    @property
    def remaining(self) -> int:
        """Tokens, known or coming, whose KV no step computes yet."""
        if not self.in_flight:
            return self.num_tokens - self.computed
        return self.num_tokens + self.coming - self.begun

    @property
    def last_is_coming(self) -> bool:
        """True where a step in flight gives the token that is the last by its length."""
        return len(self.output_ids) + self.coming >= self.max_tokens

    @property
    def last_token_at(self) -> float | None:
        """When the last token came, on the project's clock; None before the first."""
        return self._token_times[-1] if self._token_times else None

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids at the positions `start` to `stop`."""
        split = len(self.prompt_ids)
        if start >= split:
            return self.output_ids[start - split : stop - split]
        head = list(self.prompt_ids[start:stop])
        return head + self.output_ids[: max(0, stop - split)]

    def sampling_state(self) -> SamplingState:
        """Everything that the token after those that are coming depends on besides the logits."""
        params, count = self.params, len(self.output_ids) + self.coming
        banned = tuple(self.stop_ids) if count < params.min_tokens else ()
        return SamplingState(params, self.seed, count, self.prompt_ids, self.output_ids, banned)

    def mark_scheduled(self) -> None:
        """Note the first time that the request was part of a step."""
        if self._scheduled_at is None:
            self._scheduled_at = now()

    def accept(self, token_id: int, logprob: TokenLogprob | None) -> Delta:
        """Take the next token and tell what it adds; with a finish_reason the delta ends the request."""
        self.output_ids.append(token_id)
        self.num_tokens += 1
        self._token_times.append(now())
        may_stop = len(self.output_ids) >= self.params.min_tokens
        reason: str | None = None
        stop_reason: str | int | None = None
        text = ""
        if token_id in self.stop_ids and may_stop:
            reason = "stop"
            stop_reason = token_id if token_id in self.params.stop_token_ids else None
        shown = reason is None or self.params.include_stop_str_in_output
        if self.detokenizer is not None and shown:
            text, stopped = self.detokenizer.push(token_id, check_stop=may_stop)
            if stopped is not None:
                reason = "stop"
                stop_reason = stopped
        if reason is None and len(self.output_ids) >= self.max_tokens:
            reason = "length"
        return self._delta(text, (token_id,), logprob, reason, stop_reason)

    def end(self, reason: str, error: str | None = None) -> Delta:
        """End the request without a new token (`abort`, `error`)."""
        return self._delta("", (), None, reason, None, error)

    def _delta(
        self,
        text: str,
        token_ids: tuple[int, ...],
        logprob: TokenLogprob | None,
        reason: str | None,
        stop_reason: str | int | None,
        error: str | None = None,
    ) -> Delta:
        usage = timing = prompt_logprobs = None
        if reason is not None:
            self.finished = True
            usage = Usage(len(self.prompt_ids), len(self.output_ids), self.cached_tokens or 0)
            timing = self._timing()
            if self.detokenizer is not None and not isinstance(stop_reason, str):
                text += self.detokenizer.flush()
        if self.params.prompt_logprobs is not None and not self.prompt_logprobs_sent and token_ids:
            prompt_logprobs = (None, *self.prompt_logprobs)
            self.prompt_logprobs_sent = True
        return Delta(
            request_id=self.request_id,
            index=self.index,
            text=text,
            token_ids=token_ids,
            logprobs=(logprob,) if logprob is not None else None,
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            stop_reason=stop_reason,
            error=error,
            usage=usage,
            timing=timing,
        )

    def _timing(self) -> Timing:
        end = now()
        times = self._token_times
        return Timing(
            queue=(self._scheduled_at or end) - self.arrival,
            ttft=(times[0] - self.arrival) if times else 0.0,
            e2e=end - self.arrival,
            itl=tuple(b - a for a, b in pairwise(times)),
        )
