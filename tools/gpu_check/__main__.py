"""`python -m tools.gpu_check`: numbers first, then speed; see gpu_check.sh."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from piecework.devices import Device, make_device
from piecework.profile import now
from tools.gpu_check.fused import check_fused, time_fused
from tools.gpu_check.numbers import check_numbers
from tools.gpu_check.products import Call, attentions, check_calls, linears, time_calls
from tools.gpu_check.shapes import write_shape
from tools.gpu_check.speed import copy_bandwidth, time_modes

_MODELS = ("tiny-qwen3", "tiny-llama", "tiny-qwen3-moe")


def main() -> int:
    """Run all checks; 1 where a number is wrong, and then nothing is timed."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="tiny, on the simulated accelerator")
    parser.add_argument("--large", action="store_true", help="time the shape of Qwen3-8B, too (40 GB)")
    options = parser.parse_args()
    dry = options.dry
    device = "sim" if dry else "cuda"
    began = now()
    report: dict[str, Any] = {
        "card": "sim" if dry else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    with tempfile.TemporaryDirectory() as folder:
        right = _numbers(Path(folder), report, device, dry)
        if right:
            report["copy_gb_per_s"] = _bandwidth(dry)
            _rates(Path(folder), report, device, dry)
            if options.large:
                _large(Path(folder), report, device)
    report["seconds"] = now() - began
    _save(report)
    print(f"{report['card']}, torch {report['torch']}: {'ok' if right else 'WRONG NUMBERS'}")
    return 0 if right else 1


def _numbers(folder: Path, report: dict[str, Any], device: str, dry: bool) -> bool:
    """Check kernels against references, then tokens against the CPU."""
    hidden, tokens = ((64, 576), (1, 3)) if dry else ((576, 2048, 8192), (1, 33, 533))
    place = make_device(device)
    fused = check_fused(place, hidden, tokens)
    _table("fused ops against their references", fused, report)
    products = check_calls(place, _calls(place, dry, torch.float32))
    if not dry:
        products += check_calls(place, _calls(place, dry, torch.bfloat16))
    _table("int8 linears and decode attention against their references", products, report)
    numbers = []
    for name in _MODELS[: 1 if dry else None]:
        numbers += check_numbers(write_shape(folder, name), device)
    report["numbers"] = numbers
    _table("tokens, float32, against the CPU", numbers, report)
    return all(row["ok"] for row in (*fused, *products, *numbers))


def _rates(folder: Path, report: dict[str, Any], device: str, dry: bool) -> None:
    """Time the whole model first, then kernels, so that a run cut short has what matters most."""
    copy = report["copy_gb_per_s"]
    speed = _speed(folder, device, dry)
    for row in speed:
        row["share_of_copy"] = row["gb_per_s"] / copy
    report["speed"] = speed
    _table(f"speed; copy bandwidth {copy:.0f} GB/s", speed, report)
    repeats, seconds = (2, 1e-4) if dry else (7, 1e-3)
    hidden, tokens = ((64,), (1, 3)) if dry else ((4096, 576, 1024, 2048, 8192), (1, 32, 512, 4096))
    place = make_device(device)
    _table("fused ops", time_fused(place, hidden, tokens, repeats, seconds), report)
    dtype = torch.float32 if dry else torch.bfloat16
    calls = time_calls(place, _calls(place, dry, dtype, timed=True), repeats, seconds)
    for row in calls:
        row["share_of_copy"] = row["gb_per_s"] / copy
    _table("int8 linears and decode attention", calls, report)


def _large(folder: Path, report: dict[str, Any], device: str) -> None:
    """Decode and prefill of one sequence with a model of 8 billion weights."""
    shape = {"batches": (1,), "tokens": (512,), "context": 512, "repeats": 20, "modes": ("eager", "full")}
    rows = time_modes(write_shape(folder, "qwen3-8b"), device, dtype="bfloat16", **shape)
    for row in rows:
        row["share_of_copy"] = row["gb_per_s"] / report["copy_gb_per_s"]
    _table("speed of the shape of Qwen3-8B", rows, report)


def _calls(device: Device, dry: bool, dtype: torch.dtype, timed: bool = False) -> Iterator[Call]:
    if dry:
        shapes, rows, batches, contexts, dim = ((48, 40),), (1, 17), (1, 3), (20,), 16
    elif timed:
        shapes, rows = ((4096, 4096), (24576, 4096), (4096, 12288)), (1, 16, 128, 2048)
        batches, contexts, dim = (1, 8, 64), (512, 4096), 128
    else:
        shapes, rows = ((4096, 4096), (576, 1536), (130, 300)), (1, 7, 33, 64, 300)
        batches, contexts, dim = (1, 3, 40), (1, 17, 600), 128
    yield from linears(device, dtype, rows, shapes)
    yield from attentions(device, dtype, batches, contexts, dim)


def _save(report: dict[str, Any]) -> None:
    out = os.environ.get("OUT")
    if out:
        Path(out, "gpu_check.json").write_text(json.dumps(report, indent=1))


def _bandwidth(dry: bool) -> float:
    return copy_bandwidth(torch.device("cpu" if dry else "cuda"), 2**22 if dry else 2**30)


def _speed(folder: Path, device: str, dry: bool) -> list[dict[str, Any]]:
    """Steps of a model in each graph mode, in floats and with int8 weights and activations."""
    if dry:
        model, sizes = write_shape(folder, "tiny-qwen3"), {"dtype": "float32", "context": 20, "repeats": 2}
        shapes = {"auto": ((1, 2), (8,)), "w8a8-dynamic": ((1,), (8,))}
    else:
        model, sizes = write_shape(folder, "qwen3-0.6b"), {"dtype": "bfloat16", "context": 512, "repeats": 20}
        shapes = {"auto": ((1, 8, 64), (16, 32, 64, 128, 256, 512)), "w8a8-dynamic": ((1, 8, 64), (128, 512))}
    rows = []
    for quantization, (batches, tokens) in shapes.items():
        shape = {"batches": batches, "tokens": tokens, "quantization": quantization}
        rows += time_modes(model, device, **sizes, **shape)
    return rows


def _table(title: str, rows: list[dict[str, Any]], report: dict[str, Any]) -> None:
    """Print rows, and keep them at once: a run that is cut short has left what it found."""
    report.setdefault("tables", {})[title.partition(";")[0]] = rows
    _save(report)
    print(f"\n{title}", flush=True)
    names = list(rows[0])
    cells = [names, *([_cell(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
