"""The same requests to Piecework's server and to the one that llama-cpp-python ships."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.peers.install import python_of
from piecework.bench.datasets import BenchRequest, random_requests
from piecework.bench.options import ServingOptions
from piecework.bench.own_server import own_server
from piecework.bench.serving import run_serving
from piecework.tokenizer.load import load_tokenizer
from piecework.weights.source import local_source

_START_SECONDS = 60.0

SERVING_HEAD = (
    "server",
    "output tok/s",
    "requests/s",
    "TTFT median ms",
    "TTFT p99 ms",
    "ITL median ms",
    "ITL p99 ms",
    "output tokens",
)


def run(
    paths: Mapping[str, Path], environments: Path, threads: int, requests: int, shape: tuple[int, int]
) -> list[dict[str, Any]]:
    """Measure both servers on the model's Q4_1 file, one after the other, 8 requests at a time.

    Args:
        requests: how many there are.
        shape: tokens of a prompt and of an answer.
    """
    path = paths["q4_1.gguf"]
    options = ServingOptions(num_prompts=requests, max_concurrency=8, input_len=shape[0], output_len=shape[1])
    tokenizer = load_tokenizer(local_source(path))
    assert tokenizer is not None
    encode = tokenizer.encode
    wanted = random_requests(requests, *shape, 0.0, 0, lambda text: len(encode(text)))
    settings = {"model": str(path), "quantization": "gguf", "threads": threads}
    servers: dict[str, AbstractContextManager[str]] = {
        "Piecework Q4_1": own_server(settings, None),
        "llama.cpp Q4_1 (llama_cpp.server)": llama_server(path, environments, threads),
    }
    return [{"name": name, **_measure(server, options, wanted)} for name, server in servers.items()]


def _measure(
    server: AbstractContextManager[str], options: ServingOptions, requests: list[BenchRequest]
) -> dict[str, Any]:
    with server as url:
        report = asyncio.run(run_serving(url, None, options, requests, 0))
    return {name: value for name, value in report.items() if name not in ("base_url", "model_id")}


@contextmanager
def llama_server(path: Path, environments: Path, threads: int) -> Iterator[str]:
    """Run `python -m llama_cpp.server` on a free port and yield its address.

    It answers one request at a time. By its default a new request cuts off the one that streams; here
    it waits.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(python_of(environments, "llama")), "-m", "llama_cpp.server", "--model", str(path)]
    command += ["--port", str(port), "--n_ctx", "2048", "--interrupt_requests", "false"]
    command += ["--n_threads", str(threads), "--n_threads_batch", str(threads)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait(process, port)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _wait(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"llama_cpp.server does not listen (exit code {process.poll()})")


def lines(servers: list[dict[str, Any]]) -> list[list[str]]:
    """A line for each server: see `SERVING_HEAD`."""
    return [
        [
            server["name"],
            f"{server['output_throughput']:.1f}",
            f"{server['request_throughput']:.2f}",
            f"{server['median_ttft_ms']:.0f}",
            f"{server['p99_ttft_ms']:.0f}",
            f"{server['median_itl_ms']:.1f}",
            f"{server['p99_itl_ms']:.1f}",
            str(server["total_output_tokens"]),
        ]
        for server in servers
    ]
