"""A tiny Llama with a long context, and one server on it for all tests that do not end theirs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from server_process import ServerProcess
from tiny import save_tiny

CONTEXT = 4096
FLAGS = ("--dtype", "float32", "--threads", "1", "--num-pages", "1200", "--max-body-bytes", "200000")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("llama")
    return str(save_tiny(path, "llama", tokenizer=True, max_position_embeddings=CONTEXT))


@pytest.fixture(scope="session")
def server(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("server") / "log"
    with ServerProcess(folder, "--served-model-name", "tiny", *FLAGS, log=log) as running:
        yield running
        assert "Traceback" not in running.log
