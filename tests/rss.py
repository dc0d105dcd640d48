"""The peak of a process's memory, measured in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

_STATUS = Path("/proc/self/status")


def run_measured(before: str, measured: str) -> int:
    """Run both pieces of code in a fresh interpreter; by how many bytes `measured` raised its peak RSS.

    The peak is the kernel's VmHWM: getrusage's ru_maxrss would include that of the process that started it.
    """
    if not _STATUS.exists():
        pytest.skip("the peak is read from /proc")
    script = f"""\
from pathlib import Path
def high_water():
    lines = Path({str(_STATUS)!r}).read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
{dedent(before)}
start = high_water()
{dedent(measured)}
print("peak", high_water() - start)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split("peak ")[-1])
