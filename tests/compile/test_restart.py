"""What a second process finds: the cache of a first one that ended well, or was killed while compiling."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
SCRIPT = """
import json, sys
from pathlib import Path
import torch
from programs import inputs_of, program_of, random_model
model = random_model("llama", 3)
program, made = program_of(model, "inductor", cache_dir=Path(sys.argv[1]), strict=True)
inputs = inputs_of(model, 5)
with torch.inference_mode():
    error = (program.run(inputs) - model(*inputs)).abs().max().item()
print(json.dumps({"error": error, "hits": made.counters.cache_hits}))
"""


def _start(cache: Path) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"}
    environment["PYTHONPATH"] = str(TESTS)
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(cache)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _result(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = process.communicate(timeout=280)
    assert process.returncode == 0
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    assert result["error"] < 1e-4
    return result


def _kill_once_there_are(entries: int, cache: Path) -> int:
    """Kill a process that compiles when the cache has so many entries; return how many it left."""
    victim = _start(cache)
    begun = cache / "inductor"
    while len(list(cache.glob("pieces/*.json"))) < entries or not begun.is_dir():
        assert victim.poll() is None, "it ended before it could be killed"
        time.sleep(0.01)
    time.sleep(0.5)
    os.killpg(victim.pid, signal.SIGKILL)
    victim.wait()
    return len(list(cache.glob("pieces/*.json")))


@pytest.mark.slow
def test_killed_while_compiling_and_started_again(tmp_path: Path) -> None:
    """Killed with nothing compiled and with all but one; the next compiles that one, and the last nothing."""
    assert _kill_once_there_are(0, tmp_path) < 2
    left = _kill_once_there_are(2, tmp_path)
    assert left == 2
    assert _result(_start(tmp_path))["hits"] == left
    assert _result(_start(tmp_path))["hits"] == 3
