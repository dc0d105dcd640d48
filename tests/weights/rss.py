"""The peak of a process's memory, measured from outside the test's own process."""

from __future__ import annotations

import subprocess
import sys
from textwrap import dedent


def run_measured(before: str, measured: str) -> int:
    """Run both pieces of code in a fresh interpreter; by how many bytes `measured` raised its peak RSS."""
    script = f"""\
from resource import RUSAGE_SELF, getrusage
{dedent(before)}
start = getrusage(RUSAGE_SELF).ru_maxrss
{dedent(measured)}
print("peak", (getrusage(RUSAGE_SELF).ru_maxrss - start) * 1024)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split("peak ")[-1])
