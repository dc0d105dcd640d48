"""House rules that no other tool checks: short files, and no prints or clocks where they don't belong."""

from __future__ import annotations

import ast
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "piecework").rglob("*.py"))
FILES = SOURCES + sorted((ROOT / "tests").rglob("*.py"))
CLOCKS = {"perf_counter", "monotonic", "perf_counter_ns", "monotonic_ns", "process_time"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_is_long(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 500


def test_the_median_file_is_short() -> None:
    lengths = [len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES]
    assert median(length for length in lengths if length > 5) <= 130


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_it_is(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not tree.body or ast.get_docstring(tree), "a module begins with a docstring"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_one_clock(path: Path) -> None:
    if path.name == "profile.py":
        return
    tree = ast.parse(path.read_text(encoding="utf-8"))
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {name.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in node.names}
    assert not used & CLOCKS, "durations are measured with piecework.profile"
