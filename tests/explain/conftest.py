"""Tiny models as configurations alone, and a package that brings passes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_config

from piecework.cli.main import main
from piecework.config import EngineConfig
from piecework.explain.explain import explain
from piecework.explain.report import Report

PASSES = '''
import torch
from piecework.graph.passes import BITWISE, PatternPass


def double_negation():
    """neg(neg(x)) -> x: nothing that a decoder has."""
    return PatternPass(
        name="double_negation",
        pattern=lambda x: torch.ops.aten.neg(torch.ops.aten.neg(x)),
        replacement=lambda x: x + 0,
        expect="each_layer",
    )


def swap_add():
    """h + y -> y + h, which is the same bits."""
    return PatternPass(
        name="swap_add",
        pattern=lambda x, y: torch.ops.aten.add(x, y),
        replacement=lambda x, y: torch.ops.aten.add(y, x),
        expect="each_layer",
    )


def drop_add():
    """h + y -> h, which is wrong."""
    return PatternPass(
        name="drop_add",
        pattern=lambda x, y: torch.ops.aten.add(x, y),
        replacement=lambda x, y: torch.ops.aten.mul(x, 1.0),
    )
'''


@pytest.fixture(scope="session")
def configured(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make a folder with the configuration of a tiny model, and no weights."""

    def make(name: str, **overrides: Any) -> Path:
        folder = tmp_path_factory.mktemp(name)
        tiny_config(name, **overrides).save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def explained(configured: Callable[..., Path]) -> Callable[..., Report]:
    """Explain a tiny model of this name, with other settings of the engine."""

    def make(name: str, settings: dict[str, Any] | None = None, **overrides: Any) -> Report:
        values = {"model": str(configured(name, **overrides)), "dtype": "float32", **(settings or {})}
        return explain(EngineConfig.from_flat(values))

    return make


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package on the path, as pip would leave it, that brings passes through entry points."""
    info = tmp_path / "acme_passes-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-passes\nVersion: 1.0\n")
    names = ("double_negation", "swap_add", "drop_add")
    points = "".join(f"{name} = acme_passes:{name}\n" for name in names)
    (info / "entry_points.txt").write_text(f"[piecework.passes]\n{points}")
    (tmp_path / "acme_passes.py").write_text(PASSES)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield "acme-passes"
    sys.modules.pop("acme_passes", None)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run `piecework explain` in this process and return what it prints."""

    def call(*arguments: str) -> str:
        capsys.readouterr()
        code = main(["explain", *arguments])
        captured = capsys.readouterr()
        assert code == 0, captured.err
        return captured.out

    return call
