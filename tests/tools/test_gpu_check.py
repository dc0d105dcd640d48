"""The GPU check's script runs through on the simulated accelerator, and its numbers are right there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_dry_run_checks_numbers_and_times_every_mode(tmp_path):
    env = {**os.environ, "OUT": str(tmp_path), "PYTHON": sys.executable}
    done = subprocess.run(
        [ROOT / "tools/gpu_check.sh", "--dry"], env=env, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert [(row["mode"], row["ok"]) for row in report["numbers"]] == [
        ("eager", True),
        ("piecewise", True),
        ("full", True),
    ]
    assert {(row["phase"], row["mode"]) for row in report["speed"]} == {
        *((("decode"), mode) for mode in ("eager", "piecewise", "full")),
        ("prefill", "eager"),
        ("prefill", "piecewise"),
    }
