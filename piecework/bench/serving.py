"""`bench serving`: requests a second, tokens a second and latencies of an OpenAI-compatible server."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from piecework.bench.client import Outcome, Target, send
from piecework.bench.datasets import BenchRequest, CountTokens, random_requests, sharegpt_requests
from piecework.bench.load import Load, drive
from piecework.bench.options import ServingOptions
from piecework.bench.stats import describe_ms
from piecework.errors import ConfigError

if TYPE_CHECKING:
    import httpx


def make_requests(options: ServingOptions, seed: int, count_tokens: CountTokens) -> list[BenchRequest]:
    """Return the run's requests, from the data set that `options` name."""
    if options.dataset_path is not None:
        return sharegpt_requests(
            options.dataset_path, options.num_prompts, options.output_len, seed, count_tokens
        )
    return random_requests(
        options.num_prompts, options.input_len, options.output_len, options.range_ratio, seed, count_tokens
    )


async def run_serving(
    base_url: str,
    model: str | None,
    options: ServingOptions,
    requests: Sequence[BenchRequest],
    seed: int,
    on_done: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Send the requests to the server at `base_url` and return the figures.

    Without `model`, the first one that the server lists is used. Raises ConfigError where the server
    cannot be reached or answers the warm-up with an error; failures of the run itself are counted.
    """
    async with make_client(base_url, options.api_key, options.request_timeout) as client:
        target = Target(model or await first_model(client), options.endpoint, options.ignore_eos)

        async def one(request: BenchRequest) -> Outcome:
            return await send(client, target, request)

        for request in requests[: options.num_warmups]:
            outcome = await one(request)
            if outcome.error is not None:
                raise ConfigError("base_url", base_url, f"a server that answers the warm-up: {outcome.error}")
        alone = [await one(request) for request in requests[: options.verify]]
        load = await drive(
            one,
            requests,
            rate=options.request_rate,
            max_concurrency=options.max_concurrency,
            seed=seed,
            on_done=lambda outcome: on_done(),
        )
    pairs = [
        (before.text, after.text)
        for before, after in zip(alone, load.outcomes, strict=False)
        if before.error is None and after.error is None
    ]
    return {
        "base_url": base_url,
        "model_id": target.model,
        "endpoint_type": options.endpoint,
        "num_prompts": len(requests),
        "request_rate": options.request_rate if options.request_rate != float("inf") else "inf",
        "max_concurrency": options.max_concurrency,
        **figures(load),
        "outputs_compared": len(pairs),
        "outputs_equal": sum(before == after for before, after in pairs),
    }


def make_client(base_url: str, api_key: str | None, timeout: float) -> httpx.AsyncClient:
    """Return a client without a limit of its own; a proxy is never asked for an address of this machine.

    `timeout` is in seconds. Without `api_key`, that of $OPENAI_API_KEY is sent, if there is one.
    """
    import httpx

    key = api_key or os.environ.get("OPENAI_API_KEY")
    host = urlsplit(base_url).hostname
    return httpx.AsyncClient(
        base_url=base_url.rstrip("/").removesuffix("/v1"),
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=timeout,
        limits=httpx.Limits(max_connections=None),
        trust_env=host not in ("127.0.0.1", "localhost", "::1"),
    )


async def first_model(client: httpx.AsyncClient) -> str:
    """Return the first model that the server lists; ConfigError where there is no such server."""
    import httpx

    url = str(client.base_url)
    try:
        response = await client.get("/v1/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, IndexError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}".strip(": ")
        raise ConfigError("base_url", url, f"a server that lists its models ({reason})") from error


def figures(load: Load) -> dict[str, Any]:
    """Return counts, rates and latencies under the keys of vLLM's benchmark; times are of completed ones."""
    done = [outcome for outcome in load.outcomes if outcome.error is None]
    errors = Counter(outcome.error for outcome in load.outcomes if outcome.error is not None)
    inputs = sum(outcome.prompt_tokens for outcome in done)
    outputs = sum(outcome.output_tokens for outcome in done)
    return {
        "duration": load.duration,
        "completed": len(done),
        "failed": len(load.outcomes) - len(done),
        "errors": dict(errors.most_common()),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / load.duration,
        "output_throughput": outputs / load.duration,
        "total_token_throughput": (inputs + outputs) / load.duration,
        "max_concurrent_requests": load.peak,
        **describe_ms("ttft", [outcome.ttft for outcome in done]),
        **describe_ms("tpot", [outcome.tpot for outcome in done if outcome.tpot is not None]),
        **describe_ms("itl", [gap for outcome in done for gap in outcome.itl]),
        **describe_ms("e2el", [outcome.e2e for outcome in done]),
    }
