"""What chat and text completions share on the way out: gathered samples, usage, ids."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from piecework.engine.outputs import Delta, Usage
from piecework.sampling import TokenLogprob


@dataclass
class Sample:
    """One sample of one prompt, gathered from its deltas."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, delta: Delta) -> None:
        """Take in what the sample gained."""
        self.text.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


class UsageCount:
    """Adds up the token counts of a request: each prompt once, the samples of all."""

    def __init__(self, prompt_tokens: Iterable[int]) -> None:
        self._prompt = sum(prompt_tokens)
        self._cached: dict[int, int] = {}  # per prompt
        self._completion = 0

    def add(self, prompt: int, usage: Usage | None) -> None:
        """Count a sample of prompt number `prompt` that ended."""
        if usage is not None:
            self._completion += usage.completion_tokens
            # Samples of one prompt share its pages; the first one says what was there before.
            known = self._cached.get(prompt, usage.cached_tokens)
            self._cached[prompt] = min(known, usage.cached_tokens)

    def body(self, *, generated: bool = True) -> dict[str, Any]:
        """The `usage` object; `generated=False` leaves out tokens that were made but not sent."""
        completion = self._completion if generated else 0
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": completion,
            "total_tokens": self._prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }


class Envelope:
    """The fields around the choices, the same in every chunk of an answer."""

    def __init__(self, prefix: str, kind: str, model: str) -> None:
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self._fields = {"id": self.id, "object": kind, "created": int(time.time()), "model": model}

    def wrap(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """An answer or a chunk with these choices."""
        return {**self._fields, "choices": choices, **more}
