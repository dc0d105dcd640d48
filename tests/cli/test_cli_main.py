"""The dispatcher: commands, exit codes, and one readable line for each mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cli_run import Run

from piecework.cli import bench
from piecework.cli import eval as evaluate
from piecework.cli.main import COMMANDS
from piecework.native.library import library
from piecework.version import __version__


def test_help_lists_the_commands(run: Run) -> None:
    done = run("--help")
    assert done.code == 0
    assert all(name in done.out for name in COMMANDS)


def test_no_command_is_a_mistake(run: Run) -> None:
    done = run()
    assert done.code == 2 and "usage: piecework COMMAND" in done.out


def test_version(run: Run) -> None:
    assert run("--version").out == f"piecework {__version__}\n"


@pytest.mark.parametrize(
    "name",
    [*COMMANDS, *(f"bench {kind}" for kind in bench.KINDS), *(f"eval {kind}" for kind in evaluate.KINDS)],
)
def test_every_command_has_a_help(run: Run, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        raise SystemExit(run(*name.split(), "--help").code)
    assert caught.value.code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generat"], "unknown command 'generat'; the commands are generate, serve"),
        (["generate", "--page-sise", "3", "hi"], "did you mean --page-size?"),
        (["generate", "--prom", "hi"], "did you mean --prompt?"),
        (["generate", "--page-size", "many", "hi"], "--page-size/--block-size: invalid int value: 'many'"),
        (["generate", "--page-size", "0", "hi"], "page_size=0 is not allowed: an integer of at least 1"),
        (["generate", "--dtype", "float8", "hi"], "invalid choice: 'float8'"),
        (["generate", "--kv-cache-memory", "lots", "hi"], "'lots' is not a size in bytes such as"),
        (["generate", "--temperature", "-1", "hi"], "temperature=-1.0 is not allowed"),
        (["generate", "--max-tokens", "-5", "hi"], "max_tokens=-5 is not allowed"),
        (["generate", "--system", "s", "hi"], "--system needs --chat"),
        (["generate", "--config", "none.yaml", "hi"], "none.yaml"),
        (["generate", "--prompt-file", "none.txt"], "prompt file 'none.txt' cannot be read"),
        (["generate", "--model", "/no/such/folder", "hi"], "model='/no/such/folder' is not found"),
        (["pull", "/no/such/folder"], "model='/no/such/folder' is not found"),
        (["serve", "--port", "70000"], "port=70000 is not allowed"),
        (["bench"], "bench needs one of serving, latency, throughput, startup"),
        (["bench", "startup", "--layers", "8,x"], "layers='8,x' is not allowed: positive integers such as"),
        (["explain", "a", "--model", "b"], "the model is given twice: a and --model b"),
        (["check-env", "a", "--model", "b"], "the model is given twice: a and --model b"),
        (["explain", "a", "--compilation-config", ""], "compilation_config='' is not allowed: a JSON object"),
        (["explain", "/no/such/folder"], "model='/no/such/folder' is not found"),
        (["explain", "a", "--html", "/no/such/folder/page.html"], "there is no folder /no/such/folder"),
        (["explain", "a", "--html", "/"], "--html '/': has to name a file, not a folder"),
        (["explain", "a", "--html", ""], "--html '': has to name a file, not a folder"),
        (["generate", "--logit-bias", "[" * 100_000, "hi"], "is not a JSON object from token id to number"),
        (["bench", "speed"], "got 'speed'"),
        (["bench", "serving", "--request-rate", "0"], "request_rate=0.0 is not allowed"),
        (["bench", "serving", "--base-url", "http://x", "--page-size", "8"], "--page-size cannot be set"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(run: Run, arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith("piecework: error: ")
    assert message in done.err
    assert done.err.count("\n") == 1


def test_a_page_that_cannot_be_written_costs_no_report(run: Run, tiny: Path) -> None:
    done = run("explain", str(tiny), "--html", "/dev/full", "--json", "--no-verify-passes")
    assert (done.code, len(done.lines)) == (2, 1)
    assert done.err.startswith("piecework: error: --html /dev/full: cannot be written (")


def test_what_others_say_over_several_lines_is_one_line(run: Run, tiny: Path, tmp_path: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_size": "64"}))
    done = run("explain", str(tmp_path))
    warning, error = done.err.splitlines()
    assert done.code == 2 and error.startswith("piecework: error: hidden_size='64' is not allowed")
    assert warning.startswith("piecework: warning: transformers cannot read") and "expected int" in warning


def test_a_setting_of_the_machine_is_no_fault_of_a_pass(
    run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIECEWORK_ISA", "z80")
    library.cache_clear()
    try:
        done = run("explain", str(tiny))
    finally:
        library.cache_clear()
    assert done.code == 2 and done.err.count("\n") == 1
    assert done.err.startswith("piecework: error: PIECEWORK_ISA='z80' is not allowed: one of ")


def test_debug_shows_the_traceback(run: Run) -> None:
    with pytest.raises(Exception, match="is not found"):
        run("pull", "/no/such/folder", "--debug")


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "piecework", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"piecework {__version__}\n"
