"""The fused ops against what they replace: numbers, and ratios over hidden sizes and tokens."""

from __future__ import annotations

from itertools import product
from statistics import median
from typing import Any

import torch

from piecework.bench.floor import CopyLimit
from piecework.bench.kernel_cases import OPS, Inputs, as_tensors, make_case
from piecework.bench.kernel_timing import Timer, alternate
from piecework.bench.kernels import difference
from piecework.devices import Device

GOALS = {"split_qkv_rmsnorm_rope": 2.48, "add_rms_norm_quant": 1.53, "add_rms_norm_dynamic_quant": 1.35}
"""How many times as fast as its unfused sequence an op should be."""


@torch.inference_mode()
def check_fused(device: Device, hidden: tuple[int, ...], tokens: tuple[int, ...]) -> list[dict[str, Any]]:
    """Compare every fused op, and the sequences it replaces, with its reference; a row per op and dtype."""
    rows = []
    dtypes = [t for t in (torch.float32, torch.bfloat16, torch.float16) if device.supports_dtype(t)]
    for op, dtype in product(OPS, dtypes):
        errors = []
        for width, count in product(hidden, tokens):
            case = make_case(op, Inputs(device, dtype, width, count))
            expected = as_tensors(case.reference())
            for name, run in {case.op: case.fused, **case.sequences}.items():
                error = difference(as_tensors(run()), expected, dtype)
                errors += [f"{name} {count}x{width}: {error}"] if error else []
        rows.append(
            {
                "op": op,
                "dtype": str(dtype).removeprefix("torch."),
                "by": case.implementation,
                "shapes": len(hidden) * len(tokens),
                "error": "; ".join(errors[:2]),
                "ok": not errors,
            }
        )
    return rows


@torch.inference_mode()
def time_fused(
    device: Device, hidden: tuple[int, ...], tokens: tuple[int, ...], repeats: int, seconds: float
) -> list[dict[str, Any]]:
    """Time the fused ops; those with a goal over all shapes, the others at the first hidden size.

    `ratio` is to the sequence of the device's own kernels, `to_torch` to the reference in plain torch.
    Each sample replays a graph of many calls, so no time is that of Python.
    """
    timer = Timer(device, seconds)
    limit = CopyLimit(device, timer)
    dtype = device.default_dtype()
    rows = []
    for op, width, count in product(OPS, hidden, tokens):
        if op not in GOALS and width != hidden[0]:
            continue
        case = make_case(op, Inputs(device, dtype, width, count))
        runs = (case.fused, next(iter(case.sequences.values())), case.reference, limit.copy(case.nbytes))
        fused, apart, plain, copies = alternate([timer.sample(run) for run in runs], repeats)
        goal = GOALS.get(op)
        ratio, to_torch = (_ratio(times, fused) for times in (apart, plain))
        most = max(limit.rate(case.nbytes), case.nbytes / median(copies))
        rows.append(
            {
                "op": op,
                "hidden": width,
                "tokens": count,
                "by": case.implementation,
                "us": median(fused) * 1e6,
                "ratio": ratio,
                "to_torch": to_torch,
                "goal": goal or "-",
                "met": "-"
                if goal is None
                else "yes"
                if ratio >= goal
                else "torch"
                if to_torch >= goal
                else "no",
                "gb_per_s": case.nbytes / median(fused) / 1e9,
                "share_of_copy": case.nbytes / median(fused) / most,
            }
        )
    return rows


def _met(goal: float, ratio: float, to_torch: float) -> str:
    """`yes`, or against which sequence the goal is met."""
    return "yes" if ratio >= goal else "torch only" if to_torch >= goal else "no"


def _ratio(before: list[float], after: list[float]) -> float:
    return median(one / other for one, other in zip(before, after, strict=True))
