"""`eval perplexity`: windows, and the numbers of transformers on the same tokens."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from piecework.cli.main import main
from piecework.eval.data import read_text
from piecework.eval.perplexity import windows

TEXT = "the one in the other hen, then a tin in the tower; " * 16


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def evaluate(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    capsys.readouterr()
    code = main(["eval", "perplexity", *flags, "--json", "--dtype", "float32", "--compiler", "eager"])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return json.loads(printed.out)


@torch.no_grad()
def reference(folder: Path, text: str, max_tokens: int, context: int, stride: int) -> tuple[float, int]:
    """Perplexity and scored tokens as transformers' documentation computes them, and its loss."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = transformers.AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids
    ids = ids[:, :max_tokens]
    total, count, done = 0.0, 0, 0
    for begin in range(0, ids.shape[1], stride):
        end = min(begin + context, ids.shape[1])
        part = ids[:, begin:end]
        labels = part.clone()
        labels[:, : done - begin if done > begin else 0] = -100
        scored = int((labels[:, 1:] != -100).sum())
        if scored:
            total += float(model(part, labels=labels).loss) * scored
            count += scored
        done = end
        if end == ids.shape[1]:
            break
    return math.exp(total / count), count


@pytest.mark.parametrize(("context", "stride"), [(100, 100), (64, 24), (200, 199)])
def test_equal_to_transformers(
    context: int, stride: int, tiny: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = ["--context", str(context), "--stride", str(stride), "--max-tokens", "333"]
    report = evaluate(capsys, "--model", str(tiny), "--data", str(text), *lengths)
    expected, scored = reference(tiny, TEXT, 333, context, stride)
    assert report["scored_tokens"] == scored
    assert report["perplexity"] == pytest.approx(expected, rel=1e-4)
    assert report["tokens"] == 333 < report["text_tokens"]
    assert report["tokens_per_second"] == pytest.approx(333 / report["latency"])


def test_a_default_window_fits_the_context(
    tiny: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = evaluate(capsys, "--model", str(tiny), "--data", str(text), "--max-tokens", "300")
    assert (report["context"], report["stride"], report["windows"]) == (255, 255, 2)
    assert report["scored_tokens"] == 298  # the first of each window has nothing before it


def test_what_cannot_be_is_refused(tiny: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["eval", "perplexity", "--model", str(tiny), "--compiler", "eager", "--data"]
    for flags, message in [
        ([str(text), "--context", "256"], "context=256 is not allowed: at most 255"),
        ([str(text), "--context", "64", "--stride", "65"], "stride=65 is not allowed: at most context=64"),
        ([str(text), "--max-tokens", "1"], "fewer than 2 tokens"),
        ([str(text.with_name("none.txt"))], "a readable text file"),
    ]:
        assert main([*base, *flags]) == 2
        assert message in capsys.readouterr().err
    assert main(["eval", "perplexity"]) == 2
    assert "it has to be given" in capsys.readouterr().err


def test_json_lines_are_joined(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"question": "a", "n": 1, "answer": "b"}\n\n{"text": "c"}\n')
    assert read_text("data", str(path)) == "a\nb\n\nc"
    path.write_text('{"text": "a\u2028b\x85c"}\r\n', encoding="utf-8")
    assert read_text("data", str(path)) == "a\u2028b\x85c"


@pytest.mark.parametrize(
    ("line", "why"), [('{"n": 1}', "none of its fields (n) is a text"), ('"a"', "it holds a str")]
)
def test_a_malformed_line_is_refused_by_its_number(
    line: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a"}\n' + line)
    assert main(["eval", "perplexity", "--data", str(path)]) == 2
    assert f"data='{path}' is not allowed: line 2 cannot be used: {why}" in capsys.readouterr().err


@given(tokens=st.integers(2, 300), context=st.integers(2, 80), data=st.data())
def test_windows_score_every_token_once(tokens: int, context: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, context))
    parts = list(windows(tokens, context, stride))
    scored = [token for part in parts for token in range(part.scored, part.stop)]
    assert len(scored) == len(set(scored))
    assert all(part.start < part.scored < part.stop <= part.start + context for part in parts)
    missing = set(range(tokens)) - set(scored)
    # Without an overlap a window's first token is not scored; with one only that of the text.
    assert missing == (set(range(0, tokens, stride)) if stride == context else {0})
