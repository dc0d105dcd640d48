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


needs_triton = pytest.mark.skipif(
    triton_version() < (3, 7), reason="needs triton from 3.7 on, for numpy from 2.4 on"
)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("names", [("rows", "linear"), ("heads", "attention"), ("program",)], ids=" ".join)
def test_kernels_under_the_interpreter(names: tuple[str, ...]) -> None:
    files = [f"tests/triton_kernels/test_triton_{name}.py" for name in names]
    command = [sys.executable, "-m", "pytest", *files]
    command += ["-m", "not gpu", "-p", "no:cacheprovider"]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr
