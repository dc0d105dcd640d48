"""A server leaves one of more than two cores to HTTP, unless somebody says how many threads compute."""

from __future__ import annotations

from typing import Any

import pytest

from piecework.config import EngineConfig, ServerConfig
from piecework.llm import LLM
from piecework.server.run import serve


class Stop(Exception):
    """Raised where a model would be loaded."""


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """The settings that models would be loaded with."""
    found: list[EngineConfig] = []

    def load(config: EngineConfig) -> None:
        found.append(config)
        raise Stop

    monkeypatch.setattr("piecework.engine.data_parallel.make_service", load)
    monkeypatch.setattr("piecework.llm.make_service", load)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return found


def machine(monkeypatch: pytest.MonkeyPatch, processors: int, torchs: int | None = None) -> None:
    """Let this process have so many processors, and torch use as many or `torchs`."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(processors)), raising=False)
    monkeypatch.setattr("torch.get_num_threads", lambda: torchs or processors)


def threads(loads: list[EngineConfig], **settings: Any) -> int | None:
    with pytest.raises(Stop):
        serve(EngineConfig.from_flat(settings), ServerConfig(port=0))
    return loads.pop().device.threads


@pytest.mark.parametrize(
    ("processors", "torchs", "expected"),
    [
        (1, 1, None),
        (2, 2, None),
        (3, 3, 2),
        (8, 8, 7),
        (8, 4, 3),  # two processors on each core
        (4, 2, None),  # the same: what is left of each core is enough
        (6, 64, 5),
    ],
)
def test_one_of_more_than_two_cores_is_left(
    monkeypatch: pytest.MonkeyPatch,
    loads: list[EngineConfig],
    processors: int,
    torchs: int,
    expected: int | None,
) -> None:
    machine(monkeypatch, processors, torchs)
    assert threads(loads) == expected
    with pytest.raises(Stop):
        LLM("any")
    assert loads.pop().device.threads is None


def test_what_is_given_stays(monkeypatch: pytest.MonkeyPatch, loads: list[EngineConfig]) -> None:
    machine(monkeypatch, 8)
    assert threads(loads, threads=8) == 8
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    assert threads(loads) is None


def test_several_processes_share_the_others(
    monkeypatch: pytest.MonkeyPatch, loads: list[EngineConfig]
) -> None:
    machine(monkeypatch, 8, 6)
    assert threads(loads, data_parallel_size=2) == 2
    assert threads(loads, tensor_parallel_size=2) == 3
    assert threads(loads, data_parallel_size=9) == 1
