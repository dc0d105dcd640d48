"""A folder's configuration: filled in by `transformers` once, and read from the cache after that."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from piecework.weights import folder as module
from piecework.weights.folder import read_config

SMALL = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 3, "a_name_of_ours": [1]}


def folder_of(path: Path, config: dict[str, Any]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_a_config_is_filled_in_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, made = tmp_path / "cache", []
    real = module._auto_config
    monkeypatch.setattr(module, "_auto_config", lambda folder: made.append(folder) or real(folder))
    first = read_config(folder_of(tmp_path / "a", SMALL), cache)
    assert (first["hidden_size"], first["a_name_of_ours"]) == (64, [1])
    assert first["num_attention_heads"] == 32, "what the file leaves out"
    assert read_config(tmp_path / "a", cache) == first
    assert read_config(folder_of(tmp_path / "b", SMALL), cache) == first, "the content counts, not the place"
    assert len(made) == 1
    changed = read_config(folder_of(tmp_path / "a", {**SMALL, "hidden_size": 96}), cache)
    assert changed == {**first, "hidden_size": 96} and len(made) == 2
    monkeypatch.setattr(module, "version", lambda name: "another")
    assert read_config(tmp_path / "b", cache) == first and len(made) == 3
    (kept, *_) = sorted((cache / "configs").iterdir())
    for damaged in ("{", "[]"):
        kept.write_text(damaged)
    for name in "ab":
        read_config(tmp_path / name, cache)
    assert read_config(tmp_path / "b", cache) == first


def test_a_config_that_is_known_needs_no_transformers(tmp_path: Path) -> None:
    folder, cache = folder_of(tmp_path / "a", SMALL), tmp_path / "cache"
    first = read_config(folder, cache)
    code = (
        "import json, sys; from pathlib import Path; from piecework.weights.folder import read_config; "
        f"print(json.dumps(read_config(Path({str(folder)!r}), {str(cache)!r}))); "
        "print('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    config, imported = done.stdout.splitlines()
    assert json.loads(config) == first and imported == "False"


def test_what_can_not_be_read_or_kept_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    strange = {"model_type": "new_thing"}
    cache = tmp_path / "cache"
    for _ in range(2):
        with caplog.at_level(logging.WARNING):
            assert read_config(folder_of(tmp_path / "a", strange), cache) == strange
    assert caplog.text.count("its defaults are not filled in") == 2 and not cache.exists()
    monkeypatch.setattr(module, "_auto_config", lambda folder: {"dtype": object})
    assert read_config(tmp_path / "a", cache)["dtype"] is object
    assert not cache.exists()
