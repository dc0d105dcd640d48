"""What a request gave, gathered from its deltas, and the speeds that follow from it."""

from __future__ import annotations

from dataclasses import dataclass, field

from piecework.engine.outputs import Delta, Timing, Usage
from piecework.sampling import TokenLogprob


@dataclass
class Result:
    """One sample of one prompt; `index` tells the samples of a prompt apart."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: str | None = None
    error: str | None = None
    usage: Usage = field(default_factory=Usage)
    timing: Timing = field(default_factory=Timing)

    def add(self, delta: Delta) -> None:
        """Take in what one delta brought."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        if delta.finish_reason is not None:
            self.finish_reason, self.error = delta.finish_reason, delta.error
            self.usage = delta.usage or self.usage
            self.timing = delta.timing or self.timing


def speeds(usage: Usage, timing: Timing) -> dict[str, float | None]:
    """Return ttft_ms, tpot_ms (mean time between tokens), decode_tok_s and prefill_tok_s of one result.

    Prefill counts the prompt tokens that were computed, over the time from the first step to the first
    token. A figure that one token cannot give is None.
    """
    steps = usage.completion_tokens - 1
    decode = timing.e2e - timing.ttft
    prefill = timing.ttft - timing.queue
    computed = usage.prompt_tokens - usage.cached_tokens
    return {
        "ttft_ms": timing.ttft * 1e3,
        "tpot_ms": decode / steps * 1e3 if steps > 0 else None,
        "decode_tok_s": steps / decode if steps > 0 and decode > 0 else None,
        "prefill_tok_s": computed / prefill if prefill > 0 else None,
    }
