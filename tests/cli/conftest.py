"""A tiny model on disk, and the command line run in this process."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from cli_run import Done, Run
from tiny import save_tiny

from piecework.cli.main import main


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny") / "llama", "llama", tokenizer=True)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    def call(*arguments: str, stdin: str | None = None) -> Done:
        if stdin is not None:
            monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        capsys.readouterr()
        code = main(list(arguments))
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return call
