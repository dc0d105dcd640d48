"""A result as a line of JSON, and its speeds."""

from __future__ import annotations


from piecework.engine.outputs import Timing, Usage
from piecework.engine.result import Result
from piecework.sampling import TokenLogprob


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
