"""Imports of torch stay out of the garbage collector's sight, and nothing of anyone else does."""

from __future__ import annotations

import subprocess
import sys

import pytest


def _run(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_torch_is_kept_and_the_collector_runs_again() -> None:
    code = """
import gc
passes = []
gc.callbacks.append(lambda phase, info: passes.append(phase))
from piecework import LLM
print(gc.isenabled(), gc.get_freeze_count() > 50_000, passes.count("start") < 20)  # not hundreds
"""
    assert _run(code) == ["True", "True", "True"]


@pytest.mark.parametrize(
    ("before", "name", "enabled"),
    [
        ("import torch", "LLM", "True"),  # there may be objects of others by now
        ("import gc; gc.disable()", "LLM", "False"),
        ("", "SamplingParams", "True"),  # needs no torch
    ],
)
def test_what_is_left_as_it_was(before: str, name: str, enabled: str) -> None:
    code = f"""
{before}
from piecework import {name}
import gc
print(gc.isenabled(), gc.get_freeze_count())
"""
    assert _run(code) == [enabled, "0"]
