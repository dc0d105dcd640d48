"""What the engine tells about a request while it runs, and when it ends."""

from __future__ import annotations

from dataclasses import dataclass, field

from piecework.sampling import TokenLogprob


@dataclass(frozen=True)
class Usage:
    """Token counts of one request. `cached_tokens` of the prompt were not computed again."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True)
class Timing:
    """Times of one finished request, in seconds since it arrived (`queue`, `ttft`, `e2e`)."""

    queue: float = 0.0
    ttft: float = 0.0
    e2e: float = 0.0
    itl: tuple[float, ...] = ()


@dataclass(slots=True)
class Delta:
    """What one request gained since its last delta.

    `index` counts the samples of a request with n > 1. The last delta of a sequence has a
    `finish_reason`: `stop` (an end token, a stop token or a stop string; `stop_reason` says which one),
    `length`, `abort` (cancelled) or `error` (`error` holds the message). `text` never ends in half a
    character. `usage` and `timing` are set on the last delta; `prompt_logprobs` comes once, with the
    first delta, and its first entry is None (nothing precedes the first token).

    Nobody changes one; it isn't frozen since that takes five times as long to make, for every token.
    """

    request_id: str
    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    usage: Usage | None = None
    timing: Timing | None = None


@dataclass(frozen=True)
class EngineStats:
    """A snapshot of the engine: gauges, and counters since the start.

    Used pages are those of requests; cached ones only the prefix tree holds, and gives up when asked.
    Overlapped steps were sent while another one ran. `kv_moved_bytes` are those that a static cache moved in
    place, as StaticKVCache counts them.
    """

    running: int = 0
    waiting: int = 0
    kv_pages_total: int = 0
    kv_pages_used: int = 0
    kv_pages_cached: int = 0
    requests_total: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    preemptions_total: int = 0
    prefix_hits_total: int = 0
    prefix_cached_tokens_total: int = 0
    prefix_evictions_total: int = 0
    steps_total: int = 0
    overlapped_steps_total: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    kv_moved_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def kv_usage(self) -> float:
        """Share of the KV pages in use, 0 to 1."""
        return self.kv_pages_used / self.kv_pages_total if self.kv_pages_total else 0.0
