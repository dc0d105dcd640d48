"""What a request gave, gathered from its deltas."""

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
