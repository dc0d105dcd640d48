"""The commands of docs/debugging.md run as they stand there, on a tiny model in the default one's place."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from cli_run import Done, Run

from piecework.native import library

PAGE = Path(__file__).parents[2] / "docs" / "debugging.md"
COMMAND = re.compile(r"^((?:PIECEWORK_DEBUG=\d )?piecework .*)$", re.MULTILINE)
LINES = COMMAND.findall(PAGE.read_text(encoding="utf-8"))


def call(line: str, run: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Done:
    monkeypatch.chdir(tmp_path)
    line = line.replace("smollm2-135m", str(tiny)).replace("8,64", "2,3")
    # tests/bench/test_startup.py has inductor's starts, which take minutes.
    words = shlex.split(line.replace(" --compiler inductor", "") if "bench startup" in line else line)
    if "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("="))
    return run(*words[1:])


def test_the_page_has_them() -> None:
    assert len(LINES) == 15


@pytest.mark.slow
@pytest.mark.parametrize("line", LINES)
def test_a_command_of_the_page(
    line: str, run: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = call(line, run, tiny, tmp_path, monkeypatch)
    assert done.code == 0, done.err
    assert done.out  # a random model may well say nothing but spaces
    assert ("[1] Program of the body" in done.err) == line.startswith("PIECEWORK_DEBUG")
    if "--html page.html" in line:
        assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    if "bench startup" in line:
        assert "from process start to first token" in done.out


def test_each_number_shows_one_layer_more(run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--model", str(tiny), "--max-tokens", "3", "--dtype", "float32"]
    shown = []
    for depth in range(6):
        monkeypatch.setenv("PIECEWORK_DEBUG", str(depth))
        done = run("generate", "hi", *flags)
        assert done.code == 0, done.err
        shown.append(set(map(int, re.findall(r"^piecework: debug: \[(\d)\]", done.err, re.MULTILINE))))
    assert shown == [set(range(1, depth + 1)) for depth in range(6)]
    assert "traces 1, pieces 4, holes 3, distinct 3" in done.err
    assert "canonicalise           applied" in done.err
    assert "rms_norm = piecework::rms_norm(embedding, weight_1, 1e-05)  -> float32[T, 64]" in done.err
    assert ("def piece(" if library() is None else "rms_norm(x=o0, weight=i2, ") in done.err
    how = "eager pieces" if library() is None else "one call"
    assert re.search(rf"\[5\] step 0 prefill: 1 sequences, 2 tokens, {how}, ", done.err)


def test_steps_tell_what_was_replayed(run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWORK_DEBUG", "5")
    sizes = ["--capture-sizes", "2,4", "--prefill-capture-sizes", "8", "--max-model-len", "32"]
    flags = ["--model", str(tiny), "--max-tokens", "3", "--device", "sim", *sizes]
    decode = ["1 tokens, full graphs of 2 rows (1 padded, 1 replayed)"] * 2
    for prompt, prefill in (
        ("hi", "2 tokens, piecewise graphs of 8 rows (6 padded, 4 replayed)"),
        ("more tokens", "11 tokens, eager pieces"),
    ):
        done = run("generate", prompt, *flags)
        found = re.findall(r"\[5\] step (\d) (\w+): 1 sequences, (.*), [\d.]+ ms", done.err)
        assert [step[:2] for step in found] == [("0", "prefill"), ("1", "decode"), ("2", "decode")]
        assert [step[2] for step in found] == [prefill, *decode]


def test_a_depth_that_is_none_is_refused(run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWORK_DEBUG", "verbose")
    done = run("generate", "hi", "--model", str(tiny))
    assert done.code == 2
    assert "PIECEWORK_DEBUG='verbose' is not allowed: a number from 0 to 5" in done.err
