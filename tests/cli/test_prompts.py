"""Prompts from arguments, files and standard input."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from piecework.cli.parser import UserError
from piecework.cli.prompts import Prompt, parse_prompts, read_prompts


def test_a_text_file_has_one_prompt_a_line() -> None:
    assert parse_prompts(["one", "", "  ", "{two}"], "f.txt") == [Prompt("one"), Prompt("{two}")]


def test_jsonl() -> None:
    lines = ['{"prompt": "a"}', "", '{"messages": [{"role": "user"}]}', '{"prompt_token_ids": [1, 2]}']
    found = parse_prompts(lines, "-")
    assert [prompt.given for prompt in found] == ["a", [{"role": "user"}], [1, 2]]


def test_json_of_another_kind_is_text() -> None:
    assert parse_prompts(['{"a": 1}'], "f.txt") == [Prompt('{"a": 1}')]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: not JSON"),
        ("[1]", "an object with one key of prompt, messages, prompt_token_ids"),
        ('{"prompt": "a", "n": 2}', "an object with one key"),
        ('{"prompt": 3}', "prompt is a text"),
        ('{"messages": []}', "messages a list of objects"),
        ('{"prompt_token_ids": [1, true]}', "prompt_token_ids a list of ids"),
    ],
)
def test_bad_jsonl_names_the_line(line: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_prompts([line], "f.jsonl")


def test_a_line_of_jsonl_may_hold_other_ends_of_lines(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a\u2028b"}\r\n{"prompt": "c"}\n', encoding="utf-8")
    assert [p.text for p in read_prompts([], str(file))] == ["a\u2028b", "c"]


def test_arguments_come_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_text("third\n")
    found = read_prompts(["first", "second"], str(file))
    assert [prompt.text for prompt in found] == ["first", "second", "third"]


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a\nb\n"))
    assert read_prompts([], None) == [Prompt("a"), Prompt("b")]
    monkeypatch.setattr("sys.stdin", io.StringIO("c\n"))
    assert read_prompts(["x"], "-") == [Prompt("x"), Prompt("c")]
    monkeypatch.setattr("sys.stdin", io.StringIO("unread"))
    assert read_prompts(["x"], None) == [Prompt("x")]


def test_no_prompt_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    with pytest.raises(UserError, match="no prompt in standard input"):
        read_prompts([], None)
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(UserError, match="give --prompt TEXT"):
        read_prompts([], None)
