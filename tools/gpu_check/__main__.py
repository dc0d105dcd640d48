"""`python -m tools.gpu_check`: numbers first, then speed; see gpu_check.sh."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from piecework.profile import now
from tools.gpu_check.numbers import check_numbers
from tools.gpu_check.shapes import write_shape
from tools.gpu_check.speed import copy_bandwidth, time_modes

_MODELS = ("tiny-qwen3", "tiny-llama", "tiny-qwen3-moe")


def main() -> int:
    """Run all checks; 1 where a number is wrong, and then nothing is timed."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="tiny, on the simulated accelerator")
    dry = parser.parse_args().dry
    device = "sim" if dry else "cuda"
    began = now()
    report: dict[str, Any] = {
        "card": "sim" if dry else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    with tempfile.TemporaryDirectory() as folder:
        numbers = []
        for name in _MODELS[: 1 if dry else None]:
            numbers += check_numbers(write_shape(Path(folder), name), device)
        report["numbers"] = numbers
        _table("numbers, float32, against the CPU", numbers)
        right = all(row["ok"] for row in numbers)
        if right:
            report["copy_gb_per_s"] = _bandwidth(dry)
            report["speed"] = _speed(Path(folder), device, dry)
            for row in report["speed"]:
                row["share_of_copy"] = row["gb_per_s"] / report["copy_gb_per_s"]
            _table(f"speed; copy bandwidth {report['copy_gb_per_s']:.0f} GB/s", report["speed"])
    report["seconds"] = now() - began
    out = os.environ.get("OUT")
    if out:
        Path(out, "gpu_check.json").write_text(json.dumps(report, indent=1))
    print(f"{report['card']}, torch {report['torch']}: {'ok' if right else 'WRONG NUMBERS'}")
    return 0 if right else 1


def _bandwidth(dry: bool) -> float:
    return copy_bandwidth(torch.device("cpu" if dry else "cuda"), 2**22 if dry else 2**30)


def _speed(folder: Path, device: str, dry: bool) -> list[dict[str, Any]]:
    if dry:
        model = write_shape(folder, "tiny-qwen3")
        return time_modes(model, device, dtype="float32", batches=(1, 2), context=20, tokens=(8,), repeats=2)
    model = write_shape(folder, "qwen3-0.6b")
    return time_modes(
        model,
        device,
        dtype="bfloat16",
        batches=(1, 8, 64),
        context=512,
        tokens=(16, 32, 64, 128, 256, 512),
        repeats=20,
    )


def _table(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{title}")
    names = list(rows[0])
    cells = [names, *([_cell(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
