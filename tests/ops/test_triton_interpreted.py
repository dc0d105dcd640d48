"""Runs the tests of the Triton kernels under Triton's interpreter, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def triton_version() -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in version("triton").split(".")[:2])
    except PackageNotFoundError:
        return ()


@pytest.mark.skipif(triton_version() < (3, 7), reason="needs triton from 3.7 on, for numpy from 2.4 on")
@pytest.mark.parametrize(
    "marker", ["not slow and not gpu and not npu", pytest.param("slow and not gpu", marks=pytest.mark.slow)]
)
def test_kernels_under_the_interpreter(marker):
    command = [sys.executable, "-m", "pytest", "tests/triton_kernels", "-m", marker, "-p", "no:cacheprovider"]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr
