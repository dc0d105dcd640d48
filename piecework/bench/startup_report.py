"""The figures of `bench startup` as text for a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from piecework.tables import table
from piecework.units import format_size


def startup_table(report: Mapping[str, Any]) -> str:
    """A row a stage and a column a start, in seconds, then what the columns have to do with each other."""
    starts = report["starts"]
    first = starts[0]
    lines = [f"{first['dtype']} on {first['device']}, compiler {first['compiler']}; seconds of each stage"]
    head = ["stage", *(f"{s['model']}, {s['start']}" for s in starts)]
    rows: list[Sequence[object]] = [
        (stage, *(f"{s['stages'][stage]:.3f}" for s in starts)) for stage in first["stages"]
    ]
    rows.append(("from process start to first token", *(f"{s['total']:.3f}" for s in starts)))
    rows.append(("processor time till then, all threads", *(f"{s['processor']:.3f}" for s in starts)))
    lines += [table(head, rows), ""]
    lines += [_compiled(s) for s in starts]
    lines += [_comparison(report), *(filter(None, map(_memory, starts)))]
    return "\n".join(lines)


def _compiled(start: Mapping[str, Any]) -> str:
    """Say what was compiled. Counts of a program that came from the disk are those of its making."""
    programs = start["counters"].values()
    stored = [counts for counts in programs if counts.get("stored_programs")]
    made = [counts for counts in programs if not counts.get("stored_programs")]
    said = []
    if stored:
        pieces = sum(counts["distinct"] for counts in stored)
        said.append(f"{len(stored)} programs of {pieces} pieces read from the disk, nothing of them compiled")
    if made:
        compiles, hits, failures = (
            sum(counts[name] for counts in made) for name in ("compiles", "cache_hits", "compile_failures")
        )
        said.append(
            f"{compiles} pieces compiled" + (f", {hits} times from the compiler's cache" * bool(hits))
        )
        said += [f"{failures} failed"] if failures else []
    return f"{start['model']}, {start['start']}: {', '.join(said)}"


def _comparison(report: Mapping[str, Any]) -> str:
    said = f"trace and passes: {report['ms_per_layer']:.1f} ms a layer"
    if "compile_ratio" in report:
        few, many = report["layers"]
        said += (
            f"; {many} layers to {few}: compile {report['compile_ratio']:.2f}x, "
            f"trace to compile {report['pipeline_ratio']:.2f}x"
        )
    return said


def _memory(start: Mapping[str, Any]) -> str | None:
    memory = start["memory"]
    if memory["peak"] is None or memory["after_import"] is None:
        return None
    used, imports = memory["peak"] - memory["after_import"], format_size(memory["after_import"])
    weights, written = format_size(memory["weights"]), format_size(memory["kv_written"])
    return (
        f"{start['model']}, {start['start']}: {format_size(used)} at the peak, beside {imports} of imports: "
        f"{memory['ratio']:.2f}x weights ({weights}) and filled pages of the KV cache ({written} of "
        f"{format_size(memory['kv_cache'])})"
    )
