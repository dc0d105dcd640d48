"""A team of OpenMP threads that waits for a thread which has no work for it slows down all others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny import save_tiny

from piecework import LLM
from piecework.devices.cpu import CpuDevice
from piecework.native import library

pytestmark = pytest.mark.skipif(
    library() is None or not Path("/proc/self/task").exists(), reason="needs the kernels, and Linux to count"
)


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def fall_to(count: int) -> bool:
    """Whether there come to be so many: one that was waited for is listed for a moment longer."""
    end = time.time() + 60
    while threads() > count and time.time() < end:
        time.sleep(0.01)
    return threads() == count


@pytest.fixture
def three_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)
    CpuDevice().release_threads()


def work() -> int:
    """Run a loop on all threads, and return how many threads there are then."""
    x = torch.ones(1 << 20)
    assert float((x + x).sum()) == 2 << 20
    return threads()


def test_the_team_of_a_thread_ends(three_threads: None) -> None:
    busy = work()
    CpuDevice().release_threads()
    assert fall_to(busy - 2)
    assert work() == busy  # another one starts


def test_making_an_engine_leaves_no_team_behind(tmp_path: Path, three_threads: None) -> None:
    folder = str(save_tiny(tmp_path, "llama"))
    LLM(folder, threads=3).close()  # what else starts threads has done so after this one
    busy = work()
    with LLM(folder, threads=3):
        assert fall_to(busy - 2 + 1)  # the engine's
