"""The kernels as other machines run them: without vectors, with wider ones, with VNNI's multiplication.

Each is built here, the second with an emulation of what this machine may lack, and put to the tests of the
kernels in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from piecework.native import library, toolchain

pytestmark = pytest.mark.skipif(library() is None, reason="the library can't be built here")

FOLDER = Path(__file__).parent
TESTS = (
    "test_row_kernels.py",
    "test_head_kernels.py",
    "test_int8_kernels.py",
    "test_linear_kernel.py",
    "test_int8_attention.py",
    "test_block_linear.py",
    "test_coded_kernel.py",
)

RUN = f"""
import sys
import pytest
from piecework.native import toolchain
extra = sys.argv[1:]
flags = toolchain.flags
toolchain.flags = lambda name: [*flags(name), *extra]
sys.exit(pytest.main(["-x", "-p", "no:cacheprovider", *{[str(FOLDER / t) for t in TESTS]!r}]))
"""


def _run(isa: str, cache: Path, *flags: str) -> None:
    environment = {**os.environ, "PIECEWORK_ISA": isa, "PIECEWORK_CACHE": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", RUN, *flags], env=environment, capture_output=True, text=True, cwd=FOLDER
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "passed" in done.stdout and "skipped" not in done.stdout


@pytest.mark.slow
def test_without_vectors(tmp_path: Path) -> None:
    _run("portable", tmp_path)


@pytest.mark.slow
@pytest.mark.skipif("avx2" not in toolchain.supported(), reason="needs AVX2")
def test_with_the_width_of_avx512_and_vnni(tmp_path: Path) -> None:
    """Machines that have VNNI, as the kernels look for it, have AVX-512, too."""
    _run("avx2", tmp_path, "-DPIECEWORK_LANES=16", "-include", str(FOLDER / "emulated_vnni.h"))
