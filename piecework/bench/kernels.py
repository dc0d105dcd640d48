"""`bench kernels`: each fused op against the ops that it replaces, and against what memory allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import Tensor

from piecework.bench.floor import CopyLimit
from piecework.bench.kernel_cases import OPS, Case, Inputs, as_tensors, make_case
from piecework.bench.kernel_timing import Timer, alternate
from piecework.bench.options import KernelOptions
from piecework.devices import Device, make_device
from piecework.errors import ConfigError

# Of the largest value: sums in another order, and one rounding to the dtype that went the other way.
_TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
# Integers may be rounded the other way, and at a 16-bit input's own rounding by one more; few may.
_MOST_STEPS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 1}
_ROUNDED_SHARE = 0.02
# A median this much above the fastest sample says that the machine did something else, too.
_NOISY = 1.5


def chosen_ops(options: KernelOptions) -> list[str]:
    """Return the names of the ops to time; an unknown one is a ConfigError that lists the known ones."""
    names = [name.strip() for name in options.ops.split(",")] if options.ops else list(OPS)
    for name in names:
        if name not in OPS:
            raise ConfigError("ops", name, "one of " + ", ".join(OPS))
    return names


def run_kernels(
    device_name: str, threads: int | None, options: KernelOptions, on_done: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Check every op's numbers against its reference, time those that are right, and return the report.

    A row whose numbers are wrong has `error` and no times. `on_done` is called after each op and shape.
    """
    device = make_device(device_name)
    device.set_threads(threads)
    dtype = device.default_dtype() if options.dtype == "auto" else getattr(torch, options.dtype)
    if not device.supports_dtype(dtype):
        raise ConfigError("dtype", options.dtype, f"a precision that {device.name} runs")
    timer = Timer(device, options.sample_ms / 1e3)
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        limit = CopyLimit(device, timer)
        for op, hidden, tokens in product(
            chosen_ops(options), options.hidden_sizes(), options.token_counts()
        ):
            case = make_case(op, Inputs(device, dtype, hidden, tokens))
            shape = {"op": op, "hidden": hidden, "tokens": tokens}
            rows += [{**shape, **row} for row in measure(case, dtype, timer, limit, options.repeats)]
            on_done()
    return {
        "device": device_name,
        "device_name": _hardware(device),
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "captured": timer.captured,
        "wrong": sum("error" in row for row in rows),
        "suspicious": sum(bool(row.get("suspicious")) for row in rows),
        "rows": rows,
    }


def measure(
    case: Case, dtype: torch.dtype, timer: Timer, limit: CopyLimit, repeats: int
) -> list[dict[str, Any]]:
    """Return a row for each sequence that the op replaces.

    Op, sequences and a copy of as many bytes run in turn. `ratio` is the median of the rounds' ratios;
    `suspicious` marks an op that moves its bytes faster than anything is copied, which can't be right
    unless it reads much more than it writes. `fastest_` figures are of the fastest samples, which tell more
    on a machine that does other things; `noisy` marks rows whose medians are far from these.
    """
    expected = as_tensors(case.reference())
    named = {case.op: case.fused, **case.sequences}
    row: dict[str, Any] = {"implementation": case.implementation, "nbytes": case.nbytes}
    for name, run in named.items():
        error = difference(as_tensors(run()), expected, dtype)
        if error is not None:
            return [{**row, "before": name, "error": f"{name}: {error}"}]
    samples = [timer.sample(run) for run in (*named.values(), limit.copy(case.nbytes))]
    fused, *sequences, copies = alternate(samples, repeats)
    rate = case.nbytes / median(fused)
    most = max(limit.rate(case.nbytes), case.nbytes / median(copies))
    row |= {
        "fused_us": median(fused) * 1e6,
        "fastest_fused_us": min(fused) * 1e6,
        "gb_s": rate / 1e9,
        "limit_gb_s": most / 1e9,
        "limit_share": rate / most,
        "suspicious": rate > most,
    }
    found = []
    for name, times in zip(case.sequences, sequences, strict=True):
        ratio = median(apart / together for apart, together in zip(times, fused, strict=True))
        found.append(
            {
                **row,
                "before": name,
                "unfused_us": median(times) * 1e6,
                "fastest_unfused_us": min(times) * 1e6,
                "ratio": ratio,
                "fastest_ratio": min(times) / min(fused),
                "noisy": any(median(taken) > _NOISY * min(taken) for taken in (fused, times)),
            }
        )
    return found


def difference(found: Sequence[Tensor], expected: Sequence[Tensor], dtype: torch.dtype) -> str | None:
    """Say how results differ from the reference's beyond rounding; None where they don't."""
    if len(found) != len(expected):
        return f"{len(found)} results, not {len(expected)}"
    for number, (got, wanted) in enumerate(zip(found, expected, strict=True)):
        if got.shape != wanted.shape or got.dtype != wanted.dtype:
            return (
                f"result {number} is {got.dtype} {tuple(got.shape)}, not {wanted.dtype} {tuple(wanted.shape)}"
            )
        off = (got.double() - wanted.double()).abs()
        largest = float(off.max())
        if wanted.dtype == torch.int8:
            share = float((off > 0).double().mean())
            if largest > _MOST_STEPS[dtype] or share * off.numel() > max(1, _ROUNDED_SHARE * off.numel()):
                return f"result {number} is off by up to {largest:.0f}, {share:.1%} of it"
        elif not largest <= _TOLERANCES[wanted.dtype] * float(wanted.double().abs().max()):
            return f"result {number} is off by {largest:.3g}"
    return None


def _hardware(device: Device) -> str:
    if device.torch_device.type == "cuda":
        return str(torch.cuda.get_device_name(device.torch_device))
    return device.name


def kernels_table(report: dict[str, Any]) -> str:
    """Return the report as a table for a person."""
    head = (
        f"{'op':<26} {'hidden':>6} {'tokens':>6} {'by':<9} {'fused us':>10} {'before us':>10} {'ratio':>6}  "
        f"{'fastest':>7} {'GB/s':>7} {'limit':>7} {'share':>6}  before"
    )
    lines = [head]
    for row in report["rows"]:
        start = f"{row['op']:<26} {row['hidden']:>6} {row['tokens']:>6} {row['implementation']:<9}"
        if "error" in row:
            lines.append(f"{start} WRONG: {row['error']}")
            continue
        lines.append(
            f"{start} {row['fused_us']:>10.1f} {row['unfused_us']:>10.1f} {row['ratio']:>5.2f}x"
            f"{'~' if row['noisy'] else ' '}{row['fastest_ratio']:>6.2f}x "
            f"{row['gb_s']:>7.1f} {row['limit_gb_s']:>7.1f} {row['limit_share']:>6.0%}"
            f"{'!' if row['suspicious'] else ' '} {row['before']}"
        )
    how = "captured in graphs" if report["captured"] else f"called one by one, {report['threads']} threads"
    lines.append(f"{report['dtype']} on {report['device_name']}, {how}.")
    if any(row.get("noisy") for row in report["rows"]):
        lines.append("~ the samples differ much: something else ran; look at the ratio of the fastest ones.")
    if report["suspicious"]:
        lines.append("! faster than the device copies: look whether it does all its work.")
    return "\n".join(lines)
