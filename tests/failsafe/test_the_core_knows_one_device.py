"""Engine, graph and capture work on one device: only what composes them knows that there are several."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "piecework"
FILES = sorted(path for folder in ("engine", "graph", "capture") for path in (PACKAGE / folder).rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_device_list(path: Path) -> None:
    wrong, known = [], ("audit", "errors", "events")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        of_config = isinstance(node, ast.Attribute) and ast.unparse(node).endswith("device.devices")
        if of_config or (isinstance(node, ast.Name | ast.arg) and "spares" in ast.unparse(node)):
            wrong.append(f"line {node.lineno}: {ast.unparse(node)}")
        # What a failure is called and how results are judged may be known, how the next device is found not.
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        if module.startswith("piecework.failsafe") and module.rpartition(".")[2] not in known:
            wrong.append(f"line {node.lineno}: {module}")
    assert wrong == []
