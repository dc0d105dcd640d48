"""House rules that no other tool checks: short files, and no prints or clocks where they don't belong."""

from __future__ import annotations

import ast
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "piecework").rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}
FILES = SOURCES + sorted((ROOT / "tests").rglob("*.py"))
CLOCKS = {"perf_counter", "monotonic", "perf_counter_ns", "process_time"}


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_no_file_is_long() -> None:
    lengths = {_name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {name: length for name, length in lengths.items() if length > 500} == {}


def test_the_median_file_is_short() -> None:
    lengths = [len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES]
    assert median(length for length in lengths if length > 5) <= 130


def test_test_files_have_names_of_their_own() -> None:
    """Test folders are no packages, so two files of one name would be one module.

    The stand-in for torch_npu is a package.
    """
    tests = [path for path in FILES if path not in TREES and "torch_npu" not in path.parts]
    names = [path.name for path in tests if path.name != "conftest.py"]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_every_module_says_what_it_is() -> None:
    assert [_name(p) for p, tree in TREES.items() if tree.body and not ast.get_docstring(tree)] == []


def test_one_clock() -> None:
    """Durations are measured with `piecework.profile`."""
    wrong = []
    for path, tree in TREES.items():
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        used |= {n.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for n in node.names}
        if used & CLOCKS and path.name != "profile.py":
            wrong.append(_name(path))
    assert wrong == []
