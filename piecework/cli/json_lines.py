"""The lines of JSON that `generate --json` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from piecework.engine.result import Result, speeds
from piecework.sampling import TokenLogprob

if TYPE_CHECKING:
    from piecework.tokenizer.tokenizer import Tokenizer


def to_json(result: Result, prompt: Any, device: str, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return the object that `generate --json` prints; log probabilities only where they were asked for."""
    usage = result.usage
    line = {
        "prompt": prompt,
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
        },
        "timing": {name: _rounded(value) for name, value in speeds(usage, result.timing).items()},
        "device": device,
    }
    if result.index:
        line["index"] = result.index
    if result.error:
        line["error"] = result.error
    if result.logprobs:
        line["logprobs"] = _logprobs(result.logprobs, tokenizer)
    if result.prompt_logprobs is not None:
        line["prompt_logprobs"] = _logprobs(result.prompt_logprobs, tokenizer)
    return line


def _logprobs(entries: Sequence[TokenLogprob | None], tokenizer: Tokenizer | None) -> list[Any]:
    def named(token_id: int, logprob: float) -> dict[str, Any]:
        token = tokenizer.token(token_id) if tokenizer is not None else None
        return {"token_id": token_id, "token": token, "logprob": logprob}

    return [
        None if e is None else {**named(e.token_id, e.logprob), "top": [named(*pair) for pair in e.top]}
        for e in entries
    ]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
