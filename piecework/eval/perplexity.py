"""Perplexity of a text: exp of the mean negative log likelihood of its tokens, in windows of the context."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from piecework.engine.offline import run_requests
from piecework.engine.result import Result
from piecework.engine.service import Service
from piecework.errors import ConfigError, EngineDeadError, RequestError
from piecework.eval.options import PerplexityOptions
from piecework.profile import now
from piecework.sampling import LOWEST_LOGPROB, SamplingParams, TokenLogprob

DEFAULT_CONTEXT = 2048


@dataclass(frozen=True)
class Window:
    """Tokens `start` to `stop` of the text are one prompt; those from `scored` on count."""

    start: int
    scored: int
    stop: int


def windows(tokens: int, context: int, stride: int) -> Iterator[Window]:
    """Cut `tokens` into windows of at most `context`, each `stride` behind the one before.

    What a window shares with the one before is its context and is not scored again. The first token of a
    window has nothing before it and gives no score, so with stride = context one token a window is left
    out (as in "Perplexity of fixed-length models" of transformers' documentation).
    """
    done = 0
    for start in range(0, tokens, stride):
        stop = min(start + context, tokens)
        first = max(done, start + 1)
        if first < stop:
            yield Window(start, first, stop)
        done = stop
        if stop == tokens:
            return


@dataclass(frozen=True)
class Cut:
    """A text as token ids, cut into windows. `text_tokens` counts all of it, `ids` are those to read."""

    ids: Sequence[int]
    text_tokens: int
    context: int
    stride: int
    windows: Sequence[Window]


def cut(service: Service, text: str, options: PerplexityOptions) -> Cut:
    """Tokenize a text, keep the first `options.max_tokens` tokens, and cut them into windows.

    Raises ConfigError for a window that doesn't fit, RequestError for a model without a tokenizer or a
    text of one token.
    """
    if service.tokenizer is None:
        raise RequestError("this model has no tokenizer, and the data is text", param="data")
    context, stride = _lengths(service, options)
    ids = service.tokenizer.encode(text)
    used = ids[: options.max_tokens]
    if len(used) < 2:
        raise RequestError("the text has fewer than 2 tokens, and the first is not scored", param="data")
    return Cut(used, len(ids), context, stride, list(windows(len(used), context, stride)))


def run_perplexity(service: Service, text: Cut, on_done: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Score every window with the engine's prompt log probabilities and return the report.

    `on_done` is called after each window.
    """
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    sums = [0.0] * len(text.windows)
    results = [Result() for _ in sums]
    start = now()
    prompts = [text.ids[part.start : part.stop] for part in text.windows]
    with closing(run_requests(service, prompts, params)) as deltas:
        for number, delta in deltas:
            results[number].add(delta)
            if delta.finish_reason is None:
                continue
            part, result = text.windows[number], results[number]
            if result.prompt_logprobs is None or result.error is not None:
                raise EngineDeadError(result.error or f"a window ended by {result.finish_reason}")
            sums[number] = _nll(result.prompt_logprobs[part.scored - part.start :])
            results[number] = Result()  # its entries take much more room than their sum
            on_done()
    seconds = now() - start
    scored = sum(part.stop - part.scored for part in text.windows)
    nll = math.fsum(sums) / scored
    return {
        "model_id": service.model_name,
        "device": service.device_name,
        "dtype": service.dtype,
        "kv_cache_dtype": service.kv_dtype,
        "perplexity": _exp(nll),
        "nll": nll,
        "text_tokens": text.text_tokens,
        "tokens": len(text.ids),
        "scored_tokens": scored,
        "computed_tokens": sum(map(len, prompts)),
        "context": text.context,
        "stride": text.stride,
        "windows": len(text.windows),
        "latency": seconds,
        "tokens_per_second": len(text.ids) / seconds,
    }


def _lengths(service: Service, options: PerplexityOptions) -> tuple[int, int]:
    # The engine draws a token behind every prompt, which needs a place in the context.
    most = service.max_model_len - 1
    context = min(DEFAULT_CONTEXT, most) if options.context is None else options.context
    if context > most:
        raise ConfigError("context", context, f"at most {most}: the model's context less one token")
    stride = context if options.stride is None else options.stride
    if stride > context:
        raise ConfigError("stride", stride, f"at most context={context}, or tokens would be left out")
    return context, stride


def _nll(entries: Sequence[TokenLogprob | None]) -> float:
    """The negative log likelihoods of the entries, summed. The engine's lowest number stands for -inf."""
    scores = [entry.logprob for entry in entries if entry is not None]
    if len(scores) != len(entries):
        raise EngineDeadError("a token of the text came without a log probability")
    return math.inf if min(scores) <= LOWEST_LOGPROB else -math.fsum(scores)


def _exp(nll: float) -> float:
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf
