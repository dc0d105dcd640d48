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
print(json.dumps({"error": error, "hits": made.counters.cache_hits, **program.seconds}))
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


@pytest.mark.slow
def test_second_process_compiles_nothing(tmp_path: Path) -> None:
    first, second = _result(_start(tmp_path)), _result(_start(tmp_path))
    print(f"compile: first {first['compile']:.2f} s, second {second['compile']:.2f} s")
    assert (first["hits"], second["hits"]) == (0, 3)
    assert second["compile"] < first["compile"]
    assert (tmp_path / "inductor").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("entries", [0, 2])
def test_killed_while_compiling(tmp_path: Path, entries: int) -> None:
    victim = _start(tmp_path)
    begun = tmp_path / "inductor"
    while len(list(tmp_path.glob("pieces/*.json"))) < entries or not begun.is_dir():
        assert victim.poll() is None, "it ended before it could be killed"
        time.sleep(0.01)
    time.sleep(0.5)
    os.killpg(victim.pid, signal.SIGKILL)
    victim.wait()
    left = len(list(tmp_path.glob("pieces/*.json")))
    assert left < 3
    second = _result(_start(tmp_path))
    assert second["hits"] == left
    assert _result(_start(tmp_path))["hits"] == 3
