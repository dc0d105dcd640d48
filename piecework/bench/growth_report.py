"""The figures of `bench growth` as text for a person."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piecework.bench.growth_steps import PARTS
from piecework.bench.report import what_ran_line
from piecework.tables import table

_TITLES = {
    "batch": "Batch: a step of so many requests",
    "context": "Context: a step of requests with so many tokens",
    "layers": "Layers: a step of one request, random weights",
    "queue": "Queue: a step while so many wait",
}
_KEYS = {
    "batch": ("batch",),
    "context": ("batch", "context"),
    "layers": ("layers",),
    "queue": ("queue", "running"),
}
_TIMES = ("step", *PARTS, "rest")
_ACTIONS = {
    "add_us": "add",
    "abort_waiting_us": "abort waiting",
    "abort_running_us": "abort running",
}


def growth_tables(report: Mapping[str, Any]) -> str:
    """A table for each case: times in ms, and behind those that matter their growth per doubling."""
    parts = [_table(case, rows) for case, rows in report["cases"].items()]
    said = f"{what_ran_line(report)} Tokens: {report['check']}."
    return "\n\n".join([*parts, said])


def _table(case: str, rows: list[Mapping[str, Any]]) -> str:
    grows = ("step_ms", "schedule_ms", *_ACTIONS) if case == "queue" else ("step_ms",)
    columns: dict[str, Any] = {key: lambda row, key=key: row[key] for key in _KEYS[case]}
    for name in _TIMES:
        label, key = f"{name} ms", f"{name}_ms"
        columns[label] = lambda row, key=key: f"{row[key]:.3f}"
        if key in grows:
            columns[f"{name} x"] = lambda row, key=key: _factor(row, key)
    columns["tok/s"] = lambda row: f"{row['tok_s']:.1f}"
    columns["schedule %"] = lambda row: f"{row['schedule_share'] * 100:.2f}"
    columns["us/request"] = lambda row: f"{row['request_us']:.1f}"
    if case == "queue":
        for key, label in _ACTIONS.items():
            columns[f"{label} us"] = lambda row, key=key: f"{row[key]:.1f}"
            columns[f"{label} x"] = lambda row, key=key: _factor(row, key)
    lines = table(list(columns), [[cell(row) for cell in columns.values()] for row in rows])
    return f"{_TITLES[case]}; x: its time when {case} doubles\n{lines}"


def _factor(row: Mapping[str, Any], key: str) -> str:
    return f"{row['growth'][key]:.2f}" if row["growth"] and key in row["growth"] else "-"
