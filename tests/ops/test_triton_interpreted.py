"""Runs the tests of the Triton kernels under Triton's interpreter, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(
    "marker", ["not slow and not gpu and not npu", pytest.param("slow and not gpu", marks=pytest.mark.slow)]
)
def test_kernels_under_the_interpreter(marker):
    command = [sys.executable, "-m", "pytest", "tests/triton_kernels", "-m", marker, "-p", "no:cacheprovider"]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr
