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
    assert {(row["weights"], row["phase"], row["mode"]) for row in report["speed"]} == {
        (weights, phase, mode)
        for weights in ("float", "int8")
        for phase, modes in (("decode", ("eager", "piecewise", "full")), ("prefill", ("eager", "piecewise")))
        for mode in modes
    }
    tables = report["tables"]
    checked = [row for name in tables if "references" in name for row in tables[name]]
    assert {row["op"] for row in checked} >= {"add_rms_norm_quant", "linear_w8a8", "paged_attention"}
    assert all(row["ok"] for row in checked)
    assert {row["op"] for row in tables["fused ops"]} == {row["op"] for row in checked if "dtype" in row}
    assert len(tables["int8 linears and decode attention"]) == 6
