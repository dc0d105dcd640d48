"""How a request wants its tokens chosen, and what is reported of the choice."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from piecework.errors import RequestError

MAX_LOGPROBS = 20
MAX_N = 128
LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON can't say; OpenAI's API uses the same number."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings of one request; the fields have the names of the OpenAI and vLLM APIs.

    `temperature` 0 is greedy. `top_k` 0 or -1 keeps every token. `max_tokens` None means as many as the
    context allows. `logprobs` is the number of alternatives to report per token (0: only the chosen one,
    None: none); `prompt_logprobs` is the same for the prompt. A sampled token is a function of
    (`seed`, token index, logits); without a seed the engine draws one per request.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        given: Any = self.stop  # the APIs also take one string
        stop = (given,) if isinstance(given, str) else tuple(given or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias or {}))
        self._check()

    def _check(self) -> None:
        _number("temperature", self.temperature, 0.0, None)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        # A factor far from 1 would leave float32 and make every logit infinite.
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _integer("top_k", self.top_k, -1, None)
        _integer("n", self.n, 1, MAX_N)
        _integer("min_tokens", self.min_tokens, 0, None)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, None)
            if self.min_tokens > self.max_tokens:
                raise _refuse("min_tokens", self.min_tokens, f"at most max_tokens={self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise _refuse("stop", text, "a non-empty string or a list of such strings")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, None)
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, None)
            _number("logit_bias", bias, -100.0, 100.0)

    @cached_property  # asked for every token
    def greedy(self) -> bool:
        """True where the most likely token is always taken."""
        return self.temperature == 0.0

    @cached_property
    def edits(self) -> bool:
        """True where logits are changed, whatever the token's place, before a token is chosen."""
        factor, amounts = self.repetition_penalty, (self.presence_penalty, self.frequency_penalty)
        return bool(self.logit_bias or factor != 1.0 or any(amounts))

    @cached_property
    def counts_output(self) -> bool:
        """True where the tokens so far change the logits."""
        return self.repetition_penalty != 1.0 or bool(self.presence_penalty or self.frequency_penalty)

    def with_changes(self, **changes: Any) -> SamplingParams:
        """Return a copy with some fields changed; an unknown field is refused by name."""
        known = [f.name for f in fields(self)]
        for name in changes:
            if name not in known:
                raise _refuse(name, changes[name], "not a sampling field; known: " + ", ".join(known))
        return replace(self, **changes)


@dataclass(frozen=True)
class TokenLogprob:
    """Log probability of one token, and of the most likely tokens at its place (best first)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def _refuse(param: str, value: Any, allowed: str) -> RequestError:
    return RequestError(f"{param}={value!r} is not allowed: {allowed}", param=param)


def _number(param: str, value: Any, low: float | None, high: float | None, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _refuse(param, value, "a finite number")
    below = low is not None and (value <= low if open_low else value < low)
    if below or (high is not None and value > high):
        edge = "above" if open_low else "at least"
        upper = "" if high is None else f" and at most {high:g}"
        raise _refuse(param, value, f"a number {edge} {low:g}{upper}")


def _integer(param: str, value: Any, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _refuse(param, value, "an integer")
    if value < low or (high is not None and value > high):
        upper = "" if high is None else f" and at most {high}"
        raise _refuse(param, value, f"an integer of at least {low}{upper}")
