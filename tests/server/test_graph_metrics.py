"""/metrics tells what the programs did."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

import httpx
import pytest

from piecework.config import EngineConfig, ServerConfig
from piecework.engine.offline import run_requests
from piecework.engine.service import Service
from piecework.sampling import SamplingParams
from piecework.server.app import create_app


@pytest.fixture(scope="module")
def service(folder: str) -> Iterator[Service]:
    settings = {"model": folder, "dtype": "float32", "threads": 1, "num_pages": 20, "device": "sim"}
    sizes = {"decode_capture_sizes": [1, 4], "prefill_capture_sizes": [4]}
    running = Service(EngineConfig.from_flat({**settings, "compilation_config": sizes}))
    yield running
    running.close()


def metrics(service: Service) -> dict[str, float]:
    async def ask() -> str:
        transport = httpx.ASGITransport(app=create_app(service, ServerConfig()))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return (await client.get("/metrics")).text

    found = re.findall(r"^piecework_graph_(\S+) (\S+)$", asyncio.run(ask()), re.MULTILINE)
    return {name: float(value) for name, value in found}


def test_programs_are_counted(service: Service) -> None:
    found = metrics(service)
    layers = service.model_config.num_layers
    assert found['pieces{program="body"}'] == layers + 1
    assert found['holes{program="body"}'] == layers
    assert found['distinct{program="body"}'] == 3
    assert found['traces_total{program="body"}'] == found['traces_total{program="head"}'] == 1
    assert found['compiles_total{program="body"}'] == 3
    assert found['captures_total{program="body"}'] == 2 + (layers + 1)
    assert found['pass_matches_total{pass="canonicalise",program="body"}'] == layers
    assert found['recompiles_total{program="body"}'] == 0


def test_steps_are_counted(service: Service) -> None:
    before = metrics(service)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    assert len(list(run_requests(service, [[5, 6, 7]], [params]))) == 4
    after = metrics(service)
    change = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    pieces = service.model_config.num_layers + 1
    assert change == {
        'replays_total{program="body"}': pieces + 3,  # a prefill in pieces, three full decode steps
        'padded_tokens_total{program="body"}': 1,  # three prompt tokens in a graph of four
        'eager_runs_total{program="head"}': 1,  # after the prefill; a full graph holds the head
    }
