"""JSON that is nested too deeply, in every place that reads JSON of others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from piecework.bench.datasets import _load
from piecework.cache import try_read_json
from piecework.cli.parser import UserError
from piecework.cli.prompts import parse_prompts
from piecework.compile.cache import PieceCache, StaleEntryError
from piecework.errors import ConfigError, ModelError
from piecework.json_text import numbered_lines, parse_json
from piecework.quantization.texts import read_texts
from piecework.weights.folder import read_json
from piecework.weights.mapped import MappedFile
from piecework.weights.safetensors import _read_header

DEEP = "[" * 100_000


@pytest.mark.parametrize("text", [DEEP, DEEP.encode(), "{", "1" * 5000], ids=["deep", "bytes", "cut", "long"])
def test_whatever_is_wrong_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


def test_only_line_feeds_end_a_line() -> None:
    assert list(numbered_lines('"a\u2028\x85\x0cb"\n\n"c"\r\n')) == [(1, '"a\u2028\x85\x0cb"'), (3, '"c"\r')]


@pytest.mark.parametrize(
    ("name", "read", "error"),
    [
        ("config.json", read_json, ModelError),
        ("texts.jsonl", read_texts, ConfigError),
        ("chats.json", lambda path: _load(str(path)), ConfigError),
        ("prompts.jsonl", lambda path: parse_prompts([path.read_text()], "p.jsonl"), UserError),
        ("key.json", lambda path: PieceCache(path.parent).load("key"), StaleEntryError),
    ],
)
def test_a_file_that_is_nested_too_deeply_is_refused(
    tmp_path: Path, name: str, read: Callable[[Path], object], error: type[Exception]
) -> None:
    path = tmp_path / name
    path.write_text(DEEP)
    with pytest.raises(error, match="it is nested too deeply"):
        read(path)


def test_weights_whose_header_is_nested_too_deeply_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(DEEP).to_bytes(8, "little") + DEEP.encode())
    with pytest.raises(ModelError, match="it is nested too deeply"):
        _read_header(MappedFile(path))


def test_a_cached_file_that_is_nested_too_deeply_is_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "cached.json"
    path.write_text(DEEP)
    assert try_read_json(path) is None
    assert "it is nested too deeply" in caplog.text
