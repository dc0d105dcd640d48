"""What can be set for each benchmark; the flags are made from these, as those of the engine are.

Names are those that users of vLLM's and SGLang's benchmarks know.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from piecework.config import DTYPES, check, setting
from piecework.errors import ConfigError

RELAYOUT_DTYPES = ("bfloat16", "float16", "float32", "int8")
RELAYOUT_MOVES = {"grow-1.1": (10, 11), "grow-2": (1, 2), "shrink": (3, 2)}
"""Capacities before and after, in parts of the lesser one, which is full."""
STANDBYS = ("cold", "warm")
GROWTH_CASES = ("batch", "context", "layers", "queue")


@dataclass(frozen=True)
class ServingOptions:
    """`bench serving`: load on an OpenAI-compatible server."""

    base_url: str | None = setting(
        None, "the server, such as http://127.0.0.1:8000 (default: start one for the run)", flags=("--url",)
    )
    endpoint: str = setting("completions", "which API is called", choices=("completions", "chat"))
    api_key: str | None = setting(None, "sent as a bearer token (env: OPENAI_API_KEY)")
    dataset: str = setting(
        "random", "where prompts come from", flags=("--dataset-name",), choices=("random", "sharegpt")
    )
    dataset_path: str | None = setting(None, "with --dataset sharegpt: a JSON file of conversations")
    num_prompts: int = setting(100, "requests to send")
    input_len: int = setting(256, "tokens of a random prompt", flags=("--random-input-len",))
    output_len: int | None = setting(
        None,
        "tokens to generate (default: 128, or the answer's length with sharegpt)",
        flags=("--random-output-len", "--sharegpt-output-len"),
    )
    range_ratio: float = setting(
        0.0, "random lengths vary by this share up and down", flags=("--random-range-ratio",), high=1
    )
    request_rate: float = setting(math.inf, "requests a second, arriving at random (Poisson); inf: at once")
    max_concurrency: int | None = setting(None, "most requests in flight (default: no limit)")
    num_warmups: int = setting(1, "requests sent before the run and not counted", low=0)
    verify: int = setting(2, "requests sent alone first, to compare their texts with those under load", low=0)
    ignore_eos: bool = setting(True, "ask for the full length, past the end token (not every server can)")
    request_timeout: float = setting(600.0, "seconds until a request counts as failed")

    def __post_init__(self) -> None:
        check(self)
        if self.request_rate == 0:
            raise ConfigError("request_rate", self.request_rate, "a number above 0, or inf")
        if (self.dataset == "sharegpt") != (self.dataset_path is not None):
            raise ConfigError("dataset_path", self.dataset_path, "a file, with --dataset sharegpt only")


@dataclass(frozen=True)
class LatencyOptions:
    """`bench latency`: one batch of fixed shape, again and again."""

    input_len: int = setting(32, "tokens of each prompt", flags=("--random-input-len",))
    output_len: int = setting(128, "tokens to generate for each prompt", flags=("--random-output-len",))
    batch_size: int = setting(1, "prompts in the batch", flags=("--batch",))
    num_iters: int = setting(5, "timed runs")
    num_iters_warmup: int = setting(1, "runs before, not timed", flags=("--warmup",), low=0)
    against: str | None = setting(
        None,
        "JSON of engine settings: each run has one beside it with these changed, and the ratios are told",
    )

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class ThroughputOptions:
    """`bench throughput`: many prompts at once, without a server."""

    dataset: str = setting(
        "random", "where prompts come from", flags=("--dataset-name",), choices=("random", "sharegpt")
    )
    dataset_path: str | None = setting(None, "with --dataset sharegpt: a JSON file of conversations")
    num_prompts: int = setting(64, "prompts to run")
    input_len: int = setting(256, "tokens of a random prompt", flags=("--random-input-len",))
    output_len: int | None = setting(
        None,
        "tokens to generate (default: 128, or the answer's length with sharegpt)",
        flags=("--random-output-len", "--sharegpt-output-len"),
    )
    range_ratio: float = setting(
        0.0, "random lengths vary by this share up and down", flags=("--random-range-ratio",), high=1
    )
    verify: int = setting(2, "prompts run alone first, to compare their tokens with those of the run", low=0)

    def __post_init__(self) -> None:
        check(self)
        if (self.dataset == "sharegpt") != (self.dataset_path is not None):
            raise ConfigError("dataset_path", self.dataset_path, "a file, with --dataset sharegpt only")


@dataclass(frozen=True)
class StartupOptions:
    """`bench startup`: from a new process to the first token, stage by stage."""

    layers: str | None = setting(
        None,
        "random weights, with these numbers of layers, such as 8,64; a tiny Llama unless --model is given",
    )
    repeat: int = setting(1, "cold and warm starts of each model; the median is shown")
    prompt_len: int = setting(8, "tokens of the prompt")

    def __post_init__(self) -> None:
        check(self)
        self.layer_counts()

    def layer_counts(self) -> list[int]:
        """The numbers of layers, smallest first; empty for the model as it is."""
        return sorted(set(_positive("layers", self.layers))) if self.layers else []


@dataclass(frozen=True)
class GrowthOptions:
    """`bench growth`: how a decode step grows with each of four things, one table each."""

    cases: str = setting("batch,context,layers,queue", "which of the tables: " + ", ".join(GROWTH_CASES))
    batch_sizes: str = setting("1,2,4,8,16,32,64,128", "requests that run at once")
    contexts: str = setting("128,256,512,1024,2048,4096,8192", "tokens of each request")
    context_batches: str = setting("1,8", "requests that run at once, in the table of contexts")
    layers: str = setting("8,16,32,64", "layers, with random weights; a tiny Llama unless --model is given")
    queue: str = setting("10,100,1000,10000", "requests that wait")
    running: int = setting(256, "requests that run while others wait")
    input_len: int = setting(16, "tokens of a request, but in the table of contexts")
    steps: int = setting(16, "timed steps of each row; medians count")
    verify: int = setting(4, "prompts of each model run alone, to compare their tokens with those together")

    def __post_init__(self) -> None:
        check(self)
        self.chosen()
        for name in ("batch_sizes", "contexts", "context_batches", "layers", "queue"):
            self.sizes(name)

    def chosen(self) -> list[str]:
        """The tables, in the order given."""
        names = [name.strip() for name in self.cases.split(",")]
        if not set(names) <= set(GROWTH_CASES) or len(set(names)) < len(names):
            raise ConfigError("cases", self.cases, "each once of " + ", ".join(GROWTH_CASES))
        return names

    def sizes(self, name: str) -> list[int]:
        """The sizes that the field `name` lists, smallest first."""
        return sorted(set(_positive(name, getattr(self, name))))


@dataclass(frozen=True)
class WorkersOptions:
    """`bench workers`: one step to another process and back, and processes that wait."""

    children: int = setting(2, "child processes")
    step_sizes: str = setting("1,8,64", "requests in the steps that are sent")
    steps: int = setting(2000, "timed steps of each size")
    idle_seconds: float = setting(10.0, "seconds to look at children that have nothing to do")

    def __post_init__(self) -> None:
        check(self)
        self.sizes()

    def sizes(self) -> list[int]:
        """The numbers of requests, in the order given."""
        return _positive("step_sizes", self.step_sizes)


@dataclass(frozen=True)
class FailoverOptions:
    """`bench failover`: how long a batch stands still when its device fails."""

    batch_sizes: str = setting("1,8,32", "requests that run when the device fails")
    standbys: str = setting("cold,warm", "whether the next device is ready: " + ", ".join(STANDBYS))
    input_len: int = setting(64, "tokens of each prompt", flags=("--random-input-len",))
    output_len: int = setting(16, "tokens to generate for each prompt", flags=("--random-output-len",))
    fail_at: int = setting(8, "decode steps until the device fails")
    kind: str = setting(
        "error",
        "how it fails: error, its KV cache can be copied; lost, it can't; abort, its process ends",
        choices=("error", "lost", "abort", "hang"),
    )
    repeats: int = setting(3, "prefills that the pause is compared with; the median counts")

    def __post_init__(self) -> None:
        check(self)
        self.sizes()
        self.chosen()
        if self.output_len < self.fail_at + 2:
            raise ConfigError("output_len", self.output_len, f"at least fail_at + 2 = {self.fail_at + 2}")

    def sizes(self) -> list[int]:
        """The batch sizes, in the order given."""
        return _positive("batch_sizes", self.batch_sizes)

    def chosen(self) -> list[str]:
        """The kinds of standby, in the order given."""
        names = [part.strip() for part in self.standbys.split(",")]
        for name in names:
            if name not in STANDBYS:
                raise ConfigError("standbys", name, "one of " + ", ".join(STANDBYS))
        return names


@dataclass(frozen=True)
class KernelOptions:
    """`bench kernels`: each fused op against the ops that it replaces."""

    ops: str | None = setting(None, "names of fused ops, such as add_rms_norm,split_qkv_rope (default: all)")
    hidden: str = setting("576,2048,4096,8192", "hidden sizes")
    tokens: str = setting("1,32,512,4096", "numbers of tokens")
    dtype: str = setting("auto", "the precision; auto is that of the engine", choices=DTYPES)
    repeats: int = setting(7, "samples of each, taken in turn; the median counts")
    sample_ms: float = setting(2.0, "about how long a sample runs, in milliseconds")

    def __post_init__(self) -> None:
        check(self)
        self.hidden_sizes()
        self.token_counts()

    def hidden_sizes(self) -> list[int]:
        """The hidden sizes, in the order given."""
        return _positive("hidden", self.hidden)

    def token_counts(self) -> list[int]:
        """The numbers of tokens, in the order given."""
        return _positive("tokens", self.tokens)


@dataclass(frozen=True)
class RelayoutOptions:
    """`bench relayout`: keys and transposed values that get another capacity in place."""

    heads: str = setting("2,8", "key heads")
    head_dims: str = setting("64,128", "elements of a head")
    tokens: str = setting("1024,2048,4096,8192,16384,32768", "live tokens, the lesser of the two capacities")
    layers: str = setting("1,32", "layers, each with keys and values")
    dtypes: str = setting("bfloat16,int8", "element types: " + ", ".join(RELAYOUT_DTYPES))
    moves: str = setting("grow-1.1,grow-2,shrink", "changes of capacity: " + ", ".join(RELAYOUT_MOVES))
    methods: str | None = setting(
        None, "rows, ctypes, blocks: how rows move (default: the device's own)", flags=("--method",)
    )
    memory: int = setting(2**30, "most bytes of buffers; cases that need more are left out", size=True)
    repeats: int = setting(5, "samples of each, taken in turn; the median counts")
    sample_ms: float = setting(5.0, "about how long a sample runs, in milliseconds")

    def __post_init__(self) -> None:
        check(self)
        for name in ("heads", "head_dims", "tokens", "layers"):
            self.sizes(name)
        self.names("dtypes", RELAYOUT_DTYPES)
        self.names("moves", RELAYOUT_MOVES)

    def sizes(self, name: str) -> list[int]:
        """The numbers that the field `name` lists."""
        return _positive(name, getattr(self, name))

    def names(self, name: str, known: Collection[str]) -> list[str]:
        """The names that the field `name` lists, each one of `known`."""
        chosen = [part.strip() for part in getattr(self, name).split(",")]
        for part in chosen:
            if part not in known:
                raise ConfigError(name, part, "one of " + ", ".join(known))
        return chosen


def _positive(name: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(name, text, "positive integers such as 8,64")
    return [int(part) for part in parts]
