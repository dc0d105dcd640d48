"""The command in a process of its own: signals, pipes, and an environment without torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import save_tiny

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "piecework"]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        # Started in the background, the tests may ignore Ctrl-C, and a child would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.fixture
def long_run(tmp_path: Path) -> list[str]:
    """A command that goes on for many seconds, so that a busy machine has time to interrupt it."""
    model = save_tiny(tmp_path, "llama", tokenizer=True, max_position_embeddings=20000)
    return ["generate", "--model", str(model), "--prompt", "the", "--max-tokens", "15000", "--ignore-eos"]


def test_ctrl_c_ends_with_130_and_without_a_traceback(long_run: list[str]) -> None:
    process = start(*long_run)
    assert process.stdout is not None and process.stderr is not None
    with process:
        process.stdout.read(1)  # the first token is there, the others are still to come
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        errors = process.stderr.read()
    assert process.returncode == 130
    assert "Traceback" not in errors


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_it_quietly(long_run: list[str]) -> None:
    process = start(*long_run)
    assert process.stdout is not None and process.stderr is not None
    with process:
        process.stdout.read(1)
        process.stdout.close()
        errors = process.stderr.read()
    assert process.returncode == 141
    assert errors == ""


def test_check_env_works_without_torch_and_other_packages(tmp_path: Path) -> None:
    stated = tmp_path / "piecework-1.dist-info"
    stated.mkdir()
    (stated / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: piecework\nVersion: 1\n"
        "Requires-Dist: torch>=2.11\nRequires-Dist: transformers>=5.0\n"
    )
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; "
        "from piecework.cli.main import main; sys.exit(main(['check-env']))"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert done.stderr == ""
    assert "problem  torch is not installed; nothing can run without it." in done.stdout
    assert "problem  Missing packages: transformers" in done.stdout
    assert "problems found." in done.stdout
