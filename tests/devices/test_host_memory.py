"""Memory of the host that a process keeps for its next large results."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_FAULTS = """
import resource
import torch
from piecework.devices.memory import keep_freed

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)  # 64 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
anew = faults()
keep_freed()
faults()
print(anew, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="asks glibc's allocator")
def test_large_results_find_their_pages_where_freed_memory_is_kept() -> None:
    done = subprocess.run([sys.executable, "-c", _FAULTS], capture_output=True, text=True, check=True)
    anew, kept = map(int, done.stdout.split())
    assert anew > 20 * (kept + 1)  # huge pages: 32 of them, at least
