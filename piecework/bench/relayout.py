"""`bench relayout`: the in-place move against one copy of as many bytes and against two copies."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from statistics import median
from typing import Any

import torch

from piecework.bench.kernel_timing import alternate
from piecework.bench.options import RELAYOUT_DTYPES, RELAYOUT_MOVES, RelayoutOptions
from piecework.bench.relayout_cases import Case, Shape, extra_bytes
from piecework.devices import Device, make_device
from piecework.kvcache.relayout import METHODS
from piecework.profile import now
from piecework.tables import table
from piecework.units import format_size

LARGE = 2 * 2**20
"""Bytes of a tensor from which on the move is held to `TWO_COPIES`: below, calls count more than bytes."""
OF_MEMCPY, TWO_COPIES = 0.9, 1.5


def shapes(options: RelayoutOptions) -> list[Shape]:
    """Return the cases, the ones that need too much memory among them."""
    sizes = [options.sizes(name) for name in ("heads", "head_dims", "tokens")]
    dtypes = [getattr(torch, name) for name in options.names("dtypes", RELAYOUT_DTYPES)]
    moves, layers = options.names("moves", RELAYOUT_MOVES), options.sizes("layers")
    return [Shape(*case) for case in product(*sizes, dtypes, moves, layers)]


def count_cases(options: RelayoutOptions) -> int:
    """Return how often `on_done` will be called."""
    return len(shapes(options))


def run_relayout(
    device_name: str,
    threads: int | None,
    options: RelayoutOptions,
    on_done: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Check and time each case; returns the report, with the medians' ratios and what each call allocates."""
    device = make_device(device_name)
    device.set_threads(threads)
    methods: list[str] = options.names("methods", METHODS) if options.methods else [device.relayout]
    rows: list[dict[str, Any]] = []
    left_out = 0
    for shape in shapes(options):
        if shape.nbytes > options.memory:
            left_out += 1
        else:
            rows += _measure(shape, device, methods, options)
        on_done()
    good = [row for row in rows if "error" not in row]
    large = [row for row in good if row["tensor_bytes"] >= LARGE]
    return {
        "device": device.name,
        "threads": torch.get_num_threads(),
        "rows": rows,
        "left_out": left_out,
        "wrong": len(rows) - len(good),
        "reach_memcpy": sum(row["of_memcpy"] >= OF_MEMCPY for row in good),
        "large": len(large),
        "large_reach_two_copies": sum(row["of_two_copies"] >= TWO_COPIES for row in large),
        "most_extra_bytes": max((row["extra_bytes"] or 0 for row in good), default=0),
    }


def _measure(
    shape: Shape, device: Device, methods: list[str], options: RelayoutOptions
) -> list[dict[str, Any]]:
    case = Case(shape, device)
    head: dict[str, Any] = {
        "heads": shape.heads,
        "head_dim": shape.head_dim,
        "tokens": shape.tokens,
        "dtype": str(shape.dtype).removeprefix("torch."),
        "move": shape.move,
        "layers": shape.layers,
        "tensor_bytes": shape.tensor_bytes,
        "moved_bytes": case.moved,
    }
    sampled = [_sampler(device, run, options.sample_ms / 1e3) for run in (case.copy(), case.two_copies())]
    rows = []
    for method in methods:
        row = {**head, "method": method}
        rows.append(row)
        if case.wrong(method):
            row["error"] = "other values than a copy between two buffers"
            continue
        move = case.move(method)
        once, twice, own = alternate(
            [*sampled, _sampler(device, move, options.sample_ms / 1e3)], options.repeats
        )
        row |= {
            "gb_s": case.moved / median(own) / 1e9,
            "memcpy_gb_s": case.moved / median(once) / 1e9,
            "of_memcpy": median(once) / median(own),
            "of_two_copies": median(twice) / median(own),
            "extra_bytes": extra_bytes(device, move),
        }
    return rows


def _sampler(device: Device, run: Callable[[], object], seconds: float) -> Callable[[], float]:
    def timed(count: int) -> float:
        device.synchronize()
        start = now()
        for _ in range(count):
            run()
        device.synchronize()
        return (now() - start) / count

    count = max(1, min(1000, round(seconds / max(min(timed(1), timed(1)), 1e-7))))
    return lambda: timed(count)


def relayout_table(report: dict[str, Any]) -> str:
    """Return the report as a table for a person."""
    rows = [
        [
            f"{row['heads']} x {row['tokens']} x {row['head_dim']}",
            row["dtype"],
            row["move"],
            row["layers"],
            row["method"],
            format_size(row["moved_bytes"]),
            *(
                [row["error"], "", "", "", ""]
                if "error" in row
                else [
                    f"{row['gb_s']:.1f}",
                    f"{row['memcpy_gb_s']:.1f}",
                    f"{row['of_memcpy']:.2f}",
                    f"{row['of_two_copies']:.2f}",
                    "?" if row["extra_bytes"] is None else row["extra_bytes"],
                ]
            ),
        ]
        for row in report["rows"]
    ]
    head = ["heads x tokens x dim", "dtype", "move", "layers", "by", "moved", "GB/s", "memcpy", "ratio"]
    lines = [table([*head, "to two copies", "extra bytes"], rows)] if rows else []
    good = len(report["rows"]) - report["wrong"]
    lines.append(
        f"On {report['device']} with {report['threads']} threads {report['reach_memcpy']} of {good} cases "
        f"reach {OF_MEMCPY}x memcpy; of {report['large']} with tensors of 2 MiB and more "
        f"{report['large_reach_two_copies']} reach {TWO_COPIES}x two copies. "
        f"Most extra bytes: {report['most_extra_bytes']}."
    )
    if report["left_out"]:
        lines.append(f"{report['left_out']} cases need more than --memory and are left out.")
    return "\n".join(lines)
