"""`bench serving` against servers that are not ours, over real connections."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai_stub import Stub, running

from piecework.bench.datasets import BenchRequest
from piecework.bench.options import ServingOptions
from piecework.bench.report import serving_block
from piecework.bench.serving import run_serving
from piecework.errors import ConfigError

KEYS = {"duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput"}
KEYS |= {"output_throughput", "total_token_throughput", "max_concurrency", "request_rate"}
KEYS |= {f"{s}_{n}_ms" for s in ("mean", "median", "std", "p99") for n in ("ttft", "tpot", "itl", "e2el")}


def measure(server: Stub, count: int = 6, **options: Any) -> dict[str, Any]:
    requests = [BenchRequest(f"prompt {i}", 4) for i in range(count)]
    chosen = ServingOptions(base_url=server.url, **{"num_warmups": 0, "verify": 0, **options})
    return asyncio.run(run_serving(server.url, None, chosen, requests, seed=0))


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_counts_times_and_keys(endpoint: str) -> None:
    with running(tokens=4, gap=0.02) as server:
        report = measure(server, endpoint=endpoint, num_warmups=2, verify=3)
    assert report.keys() >= KEYS
    assert (report["completed"], report["failed"]) == (6, 0)
    assert (report["total_input_tokens"], report["total_output_tokens"]) == (42, 24)
    assert report["model_id"] == "stub-model"
    assert (report["outputs_compared"], report["outputs_equal"]) == (3, 3)
    assert len(server.bodies) == 6 + 2 + 3
    assert 19 <= report["mean_ttft_ms"] <= report["mean_e2el_ms"]
    # The last of four texts is sent after four gaps, however late this process reads the first ones.
    assert report["mean_itl_ms"] > 0 and report["mean_ttft_ms"] + 3 * report["mean_itl_ms"] >= 79
    each = (report["mean_e2el_ms"] - report["mean_ttft_ms"]) / 3
    assert report["mean_tpot_ms"] == pytest.approx(each) and each >= report["mean_itl_ms"]
    assert 79 <= report["median_e2el_ms"] <= report["p99_e2el_ms"] <= report["duration"] * 1e3
    assert report["output_throughput"] == pytest.approx(24 / report["duration"])
    assert report["total_token_throughput"] == pytest.approx(66 / report["duration"])


def test_bodies_ask_for_a_greedy_stream_of_full_length() -> None:
    with running() as server:
        measure(server, count=1, endpoint="chat", api_key="secret")
        measure(server, count=1, ignore_eos=False)
    chat, text = server.bodies
    assert chat["messages"] == [{"role": "user", "content": "prompt 0"}]
    assert chat["stream"] is True and chat["stream_options"] == {"include_usage": True}
    assert (chat["temperature"], chat["max_tokens"], chat["ignore_eos"]) == (0.0, 4, True)
    assert text["prompt"] == "prompt 0" and "ignore_eos" not in text
    assert server.keys[0] == "Bearer secret"


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("status", "HTTP 422: ignore_eos is not known"),
        ("breaks", "the stream broke off before [DONE]"),
        ("error", "out of memory"),
        ("silent", "the stream held no text"),
    ],
)
def test_failures_are_counted_and_told(failure: str, message: str) -> None:
    with running(failure=failure) as server:
        report = measure(server, count=3)
    assert (report["completed"], report["failed"]) == (0, 3)
    assert report["errors"] == {message: 3}
    assert report["request_throughput"] == 0
    assert f"3 failed: {message}" in serving_block(report)


def test_a_server_that_goes_away_is_a_failure() -> None:
    with running() as server:
        url = server.url
    options = ServingOptions(base_url=url, num_warmups=0, verify=0)
    report = asyncio.run(run_serving(url, "m", options, [BenchRequest("p", 4)], seed=0))
    assert report["failed"] == 1
    assert "Connect" in next(iter(report["errors"]))


def test_no_server_at_all_is_an_error() -> None:
    with running() as server:
        url = server.url
    with pytest.raises(ConfigError, match=r"base_url=.*a server that lists its models"):
        asyncio.run(run_serving(url, None, ServingOptions(base_url=url), [BenchRequest("p", 4)], seed=0))


def test_a_failing_warm_up_ends_the_run() -> None:
    with running(failure="status") as server, pytest.raises(ConfigError, match="ignore_eos is not known"):
        measure(server, num_warmups=1)


def test_tokens_are_counted_where_the_server_does_not() -> None:
    with running(tokens=5, usage=False) as server:
        report = measure(server, count=2)
    assert report["total_output_tokens"] == 10


def test_concurrency_is_limited() -> None:
    with running(tokens=3, gap=0.02) as server:
        report = measure(server, count=8, max_concurrency=2)
    assert server.peak == 2
    assert report["max_concurrent_requests"] == 2


def test_all_at_once_without_a_limit() -> None:
    with running(tokens=3, together=8) as server:
        report = measure(server, count=8)
    assert report["max_concurrent_requests"] == server.peak == 8


def test_requests_arrive_at_the_rate() -> None:
    with running(tokens=1) as server:
        report = measure(server, count=10, request_rate=40.0)
    assert 0.1 <= report["duration"] <= 9  # a quarter of a second
    assert report["request_rate"] == 40.0


def test_the_block_has_the_known_lines() -> None:
    with running() as server:
        text = serving_block(measure(server, verify=1))
    for line in (
        "Serving Benchmark Result",
        "Successful requests:                     6",
        "Request throughput (req/s):",
        "Output token throughput (tok/s):",
        "Total token throughput (tok/s):",
        "Mean TTFT (ms):",
        "Median TPOT (ms):",
        "P99 ITL (ms):",
        "Std E2EL (ms):",
        "1 of 1 texts under load equal to the text alone.",
    ):
        assert line in text
