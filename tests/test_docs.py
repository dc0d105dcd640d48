"""What README and docs say can be done, can: commands parse, names of files are right, examples run."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from piecework.cli import bench
from piecework.cli import eval as evaluate
from piecework.cli.main import COMMANDS, main
from piecework.cli.parser import Parser

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every `piecework ...` line of a code block or a table, with the page that it stands on."""
    for page in PAGES:
        for line in page.read_text(encoding="utf-8").splitlines():
            for found in re.findall(r"(?:^ {0,4}|`)(piecework [a-z][^`|]*)", line):
                yield page.name, shlex.split(found, comments=True)


def parser_of(words: list[str]) -> tuple[Parser, list[str]]:
    """The parser of a command line, and what is left for it."""
    if words[1] == "bench":
        return bench.make_parser(words[2]), words[3:]
    if words[1] == "eval":
        return evaluate.make_parser(words[2]), words[3:]
    return import_module(COMMANDS[words[1]][0]).make_parser(), words[2:]


def test_every_command_on_a_page_is_one() -> None:
    known = list(commands())
    assert len(known) >= 15
    for page, words in known:
        if words[1:] and words[-1] != "--help":
            parser, rest = parser_of(words)
            assert parser.parse(rest), f"{page}: {shlex.join(words)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_links_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = [ROOT / name for name in re.findall(r"`((?:piecework|tests|docs)/[\w/.]+)`", text)]
    linked = [page.parent / name for name in re.findall(r"\]\((?!https?:)([^)#]+)\)", text)]
    assert [str(path) for path in named + linked if not path.exists()] == []


@pytest.mark.slow
def test_the_walk_runs_as_written(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [words for page, words in commands() if page == "request.md"]
    assert len(lines) == 3
    for words in lines:
        assert main(words[1:]) == 0
    printed = capsys.readouterr().out
    assert "Paris" in json.loads(printed.splitlines()[0])["text"]
    assert "decode.run" in printed
    assert int(re.search(r"Preemptions:\s+(\d+)", printed)[1]) > 0  # type: ignore[index]


@pytest.mark.slow
def test_the_readmes_python_runs_as_written(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGES[0].read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "Paris" in printed and "Tokyo" in printed


def test_the_example_of_a_devices_operation_runs_as_written() -> None:
    page = ROOT / "docs" / "adding-a-device.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(code, page.name, "exec"), {})
