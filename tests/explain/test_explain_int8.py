"""Quantised models: explain makes the program that the engine would, and reads no weight for it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_explain_report import Command

from piecework.explain.report import Report

sys.path.insert(0, str(Path(__file__).parents[1] / "quantization"))
from int8_checkpoints import write


def matches(report: Report) -> dict[str, int]:
    return {entry.name: entry.matches for entry in report.body.passes if "quant" in entry.name}


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        (
            "w8a8-dynamic",
            {"add_rms_norm_dynamic_quant": 5, "rms_norm_dynamic_quant": 1, "silu_mul_dynamic_quant": 3},
        ),
        ("w8", {}),
        ("none", {}),
    ],
)
def test_quantised_on_load(explained: Callable[..., Report], scheme: str, expected: dict[str, int]) -> None:
    report = explained("llama", {"quantization": scheme})
    assert matches(report) == expected
    int8 = {"w8a8-dynamic": "piecework::linear_w8a8", "w8": "piecework::linear_w8"}
    assert report.body.ops.get(int8.get(scheme, ""), 0) == (12 if scheme in int8 else 0)


@pytest.mark.parametrize("style", ["compressed", pytest.param("modelslim", marks=pytest.mark.slow)])
def test_a_checkpoint_that_is_quantised(tmp_path: Path, command: Command, style: str) -> None:
    folder, _ = write(tmp_path, "llama", "static", style)
    found: dict[str, Any] = json.loads(command(str(folder), "--json"))
    entries = {e["name"]: e["matches"] for e in found["programs"][0]["passes"]}
    assert {name: n for name, n in entries.items() if "quant" in name} == {
        "add_rms_norm_quant": 5,
        "rms_norm_quant": 1,
        "silu_mul_quant": 3,
    }
    listed = {choice["name"]: choice["note"] for choice in found["passes"]}
    assert listed["add_rms_norm_dynamic_quant"] == "not run: the model has nothing for it"
    assert listed["div_fuse"] == "not run: off by default here"
