"""Imports of torch stay out of the garbage collector's sight, and nothing of anyone else does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _run(code: str, first: Path = ROOT) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": f"{first}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_torch_is_kept_and_the_collector_runs_again() -> None:
    code = """
import gc
passes = []
gc.callbacks.append(lambda phase, info: passes.append(phase))
from piecework.collector import imports_stay
with imports_stay():
    import torch
print(gc.isenabled(), gc.get_freeze_count() > 50_000, passes.count("start") < 20)  # not hundreds
"""
    assert _run(code) == ["True", "True", "True"]


@pytest.mark.parametrize(
    ("before", "imported", "enabled"),
    [
        ("import torch", "torch", "True"),  # there may be objects of others by now
        ("import gc; gc.disable()", "torch", "False"),
        ("", "json", "True"),
    ],
)
def test_what_is_left_as_it_was(tmp_path: Path, before: str, imported: str, enabled: str) -> None:
    (tmp_path / "torch.py").touch()  # importing the real one takes long
    code = f"""
{before}
import gc
from piecework.collector import imports_stay
with imports_stay():
    import {imported}
print(gc.isenabled(), gc.get_freeze_count())
"""
    assert _run(code, tmp_path) == [enabled, "0"]
