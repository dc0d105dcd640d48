"""The Triton kernels compile for a GPU that is not there: what their interpreter doesn't check."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_FEW_BYTES = 64  # of a thread; products whose rows are not aligned to 16 bytes need most registers
KERNELS = {"norm", "elementwise", "heads", "linear", "decode", "combine"}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("capability, dtype", [("90", "bfloat16"), ("80", "float16")])
def test_kernels_compile_and_keep_their_values_in_registers(capability, dtype, tmp_path):
    pytest.importorskip("triton", reason="triton is not installed")
    script = ROOT / "tests/triton_kernels/compile_kernels.py"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, script, capability, dtype], env=env, capture_output=True, text=True, timeout=850
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert {line.split("_kernel")[0] for line in lines} == KERNELS
    for line in lines:
        spilled = int(re.search(r"spilled (\d+)", line)[1])
        assert spilled <= _FEW_BYTES, line
