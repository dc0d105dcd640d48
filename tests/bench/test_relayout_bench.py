"""`bench relayout`: figures fit together, wrong moves are told, and large cases are left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from piecework.bench.relayout_cases import Case, Shape, extra_bytes
from piecework.cli.main import main
from piecework.devices import make_device
from piecework.kvcache import relayout

QUICK = ["--repeats", "2", "--sample-ms", "0.05", "--heads", "2", "--head-dims", "8", "--tokens", "40"]


def run(capsys: pytest.CaptureFixture[str], *flags: str, code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["bench", "relayout", *QUICK, "--json", *flags]) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("device", "methods"), [("cpu", "rows,ctypes,blocks"), ("sim", "blocks")])
def test_figures_fit_together(device: str, methods: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = run(capsys, "--layers", "1,2", "--device", device, "--methods", methods, "--threads", "1")
    assert len(report["rows"]) == 2 * 3 * 2 * len(methods.split(",")) and report["wrong"] == 0
    for row in report["rows"]:
        rows = 1 * 40 * 8 + 15 * 40  # keys but the first head's, values but the first row
        assert row["moved_bytes"] == row["layers"] * rows * getattr(torch, row["dtype"]).itemsize
        assert row["gb_s"] > 0 and row["of_memcpy"] == pytest.approx(row["gb_s"] / row["memcpy_gb_s"])
    assert main(["bench", "relayout", *QUICK, "--layers", "1", "--memory", "5000"]) == 0
    assert "3 cases need more than --memory and are left out" in capsys.readouterr().out


def test_a_wrong_move_is_told_and_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing: Callable[..., None] = lambda moves: None  # noqa: E731
    monkeypatch.setattr(relayout, "METHODS", {**relayout.METHODS, "ctypes": nothing})
    report = run(capsys, "--methods", "ctypes", "--dtypes", "int8", "--layers", "1", code=1)
    assert report["wrong"] == 3 and all("gb_s" not in row for row in report["rows"])


def test_extra_memory_is_measured_and_there_is_none() -> None:
    device = make_device("cpu")
    case = Case(Shape(8, 64, 4096, torch.bfloat16, "grow-1.1", 2), device)
    kept = []
    # More than the allocator ever takes from memory that was freed before (mallopt(3), M_MMAP_THRESHOLD).
    allocated = extra_bytes(device, lambda: kept.append(torch.ones(2**26, dtype=torch.int8)))
    if allocated is None:
        pytest.skip("the system doesn't tell")
    assert allocated >= 2**25
    case.move("rows")()
    assert (extra_bytes(device, case.move("rows")) or 0) < 2**19 < case.moved // 16


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "relayout", "--methods", "magic"]) == 2
    assert "one of rows, ctypes, blocks" in capsys.readouterr().err
