"""Results as JSON and as a page; a run replaces the rows that it measured again and keeps the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.peers import serving, table
from benchmarks.peers.contenders import CASES, PRECISIONS
from benchmarks.peers.machine import sentence


def merge(path: Path, report: dict[str, Any]) -> dict[str, Any]:
    """Return what `path` holds with the rows and servers of `report` over it."""
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": [], "servers": []}
    rows = {(row["precision"], row["case"]): row for row in [*old["rows"], *report["rows"]]}
    order = [(precision, case) for precision in PRECISIONS for case in CASES]
    return {
        **report,
        "rows": sorted(rows.values(), key=lambda row: order.index((row["precision"], row["case"]))),
        "servers": report["servers"] or old["servers"],
    }


def page(report: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    versions = {
        engine["name"].split()[0]: engine["version"] for row in report["rows"] for engine in row["engines"]
    }
    known = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    parts = [
        "# Piecework beside its peers",
        f"{report['model']}, {report['threads']} threads; {known}.\n{sentence(report['machine'])}.",
        "Made by `python -m benchmarks.peers`; docs/benchmarks.md says what the columns are.",
        table.markdown(table.SUMMARY_HEAD, table.summary(report["rows"])),
        "## All engines",
        table.markdown(table.ALL_HEAD, table.everything(report["rows"])),
    ]
    if report["servers"]:
        parts += ["## Servers", table.markdown(serving.SERVING_HEAD, serving.lines(report["servers"]))]
    return "\n\n".join(parts) + "\n"


def save(folder: Path, name: str, report: dict[str, Any]) -> dict[str, Any]:
    """Write NAME.json and NAME.md, and return all that they hold now."""
    folder.mkdir(parents=True, exist_ok=True)
    merged = merge(folder / f"{name}.json", report)
    (folder / f"{name}.json").write_text(json.dumps(merged, indent=1) + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(page(merged), encoding="utf-8")
    return merged
