"""Settings of the KV cache and the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from piecework.config.fields import check, setting
from piecework.errors import ConfigError

KV_CACHE_DTYPES = ("auto", "int8")
KV_STRATEGIES = ("paged", "static")


@dataclass(frozen=True)
class CacheConfig:
    """The KV cache."""

    page_size: int = setting(16, "tokens in one page of the KV cache", flags=("--block-size",))
    kv_cache_memory: int | None = setting(
        None,
        "bytes for the KV cache (default on CPU: min(1 GiB, a quarter of free memory))",
        flags=("--kv-cache-memory-bytes",),
        size=True,
    )
    num_pages: int | None = setting(
        None, "pages in the KV cache, in place of a size in bytes", flags=("--num-gpu-blocks-override",)
    )
    max_num_pages: int | None = setting(
        None, "most pages that the cache may be resized to while it runs (default: those it begins with)"
    )
    kv_cache_dtype: str = setting(
        "auto",
        "int8 keeps keys and values in half the memory, with a scale for each token and head; auto is the "
        "run's precision",
        choices=KV_CACHE_DTYPES,
    )
    prefix_caching: bool = setting(
        True,
        "keep full pages of ended requests, and begin behind those whose tokens a prompt begins with",
        flags=("--enable-prefix-caching",),
    )
    kv_strategy: str = setting(
        "paged",
        "static keeps each sequence in one piece, for devices that run fixed shapes only (docs/kv-cache.md)",
        choices=KV_STRATEGIES,
    )
    kv_capacities: str | None = setting(
        None, "static: tokens that each decode program has room for (default: 1024,2048,4096)"
    )
    kv_slots: int = setting(1, "static: sequences that have a buffer, and so run or are kept, at once")
    kv_transpose_values: bool = setting(False, "static: keep values transposed, tokens last")

    def __post_init__(self) -> None:
        check(self)
        _ = self.capacities

    @property
    def capacities(self) -> tuple[int, ...]:
        """The sizes of `kv_capacities`, smallest first; none where it isn't given."""
        given = [] if self.kv_capacities is None else self.kv_capacities.split(",")
        sizes = sorted({int(text) for text in given if text.strip().isdecimal()})
        if len(sizes) < len(given) or 0 in sizes:
            raise ConfigError(
                "kv_capacities", self.kv_capacities, "numbers of tokens, each once, such as 256,512,1024"
            )
        return tuple(sizes)


@dataclass(frozen=True)
class SchedulerConfig:
    """What runs together in a step."""

    max_num_seqs: int = setting(64, "most requests that run at once", flags=("--max-running-requests",))
    max_num_batched_tokens: int = setting(
        2048, "most tokens in one step", flags=("--max-prefill-tokens", "--token-budget")
    )
    chunk_size: int = setting(
        512,
        "most prompt tokens of one request in one step",
        flags=("--chunked-prefill-size", "--long-prefill-token-threshold"),
    )
    async_scheduling: bool = setting(
        False, "schedule and send the next step while one runs (docs/workers.md)"
    )
    max_queue: int = setting(
        1024, "most requests that wait; more are answered 429", flags=("--max-queued-requests",)
    )

    def __post_init__(self) -> None:
        check(self)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                "max_num_batched_tokens",
                self.max_num_batched_tokens,
                f"at least max_num_seqs={self.max_num_seqs}, since each request that decodes takes one",
            )
