"""The report as text, section by section; each function gives lines that make sense alone."""

from __future__ import annotations

from collections.abc import Sequence

from piecework.explain.report import CODED, BreakEven, CaptureReport, Choice, ProgramReport, Report
from piecework.tables import runs, table
from piecework.units import format_size

_INDENT = "  "


def report_text(report: Report) -> str:
    """The whole report."""
    parts = [headline(report)]
    for program in report.programs:
        parts += [program_text(program), ops_text(program), passes_text(program), kinds_text(program)]
    parts += [captures_text(report.capture), break_even_text(report.break_even)]
    named: tuple[tuple[str, tuple[Choice, ...]], ...] = (
        ("Devices", report.devices),
        ("Compilers", report.compilers),
        ("Passes", report.passes),
    )
    parts += [choices_text(title, choices) for title, choices in named]
    return "\n\n".join(part for part in parts if part)


def headline(report: Report) -> str:
    """The model, how it runs, and what its matrices are."""
    weights = ", ".join(f"{w.matrices} {w.type} ({format_size(w.bytes)})" for w in report.weights)
    if any(w.type == CODED for w in report.weights):
        weights += "; in 12 bits are at most these: a matrix of too many different upper bytes stays in 16"
    return (
        f"{report.model}: {report.architecture} of {report.layers} layers, "
        f"{report.dtype} on {report.device}, compiler {report.compiler}, "
        f"up to {report.max_model_len} tokens; "
        f"matrices: {weights}"
    )


def program_text(program: ProgramReport) -> str:
    """Counts, the order of pieces, and the time of each stage."""
    title = f"Program of the {program.name}"
    if program.opaque_reason is not None:
        return f"{title}\n{_INDENT}runs eagerly, as one hole: {program.opaque_reason}"
    holes = sorted({step.hole for step in program.steps if step.hole})
    between = f" ({', '.join(holes)})" if holes else ""
    lines = [
        title,
        f"{_INDENT}{_count(program.pieces, 'piece')}, {_count(program.holes, 'hole')}{between}, "
        f"{_count(program.distinct_pieces, 'distinct piece')}: {order_of(program)}",
        _INDENT + ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in program.seconds.items()),
    ]
    return "\n".join(lines)


def order_of(program: ProgramReport) -> str:
    """The pieces' letters in their order, `A, 29 x B, C`."""
    letters = [step.kind for step in program.steps if step.kind]
    return ", ".join(kind if times == 1 else f"{times} x {kind}" for kind, times in runs(letters))


def ops_text(program: ProgramReport) -> str:
    """How often each op is called, as traced and after all passes."""
    names = sorted({*program.ops_traced, *program.ops})
    if not names:
        return ""
    rows: list[Sequence[object]] = [
        (name, program.ops_traced.get(name, 0), program.ops.get(name, 0)) for name in names
    ]
    rows.append(("all", sum(program.ops_traced.values()), sum(program.ops.values())))
    return f"Ops of the {program.name}\n" + table(("op", "traced", "after passes"), rows, _INDENT)


def passes_text(program: ProgramReport) -> str:
    """Each pass, and why it did nothing."""
    if not program.passes:
        return ""
    head = ("pass", "status", "matches", "ops", "ms", "bound", "verified error")
    rows: list[Sequence[object]] = []
    for entry in program.passes:
        ran = entry.ops_before > 0
        ops = f"{entry.ops_before} -> {entry.ops_after}" if ran else ""
        error = "not verified" if entry.error is None else f"{entry.error:.3g}"
        matches = entry.matches if ran else None
        rows.append(
            (entry.name, entry.status, matches, ops, f"{entry.ms:.1f}", entry.bound, error if ran else "")
        )
    lines = [f"Passes over the {program.name}", table(head, rows, _INDENT)]
    for entry in program.passes:
        lines += [f"{_INDENT}{entry.name}: {entry.reason}"] if entry.reason else []
        lines += [f"{_INDENT}{entry.name}: {n} times not, {reason}" for reason, n in entry.refused.items()]
    return "\n".join(lines)


def kinds_text(program: ProgramReport) -> str:
    """Each distinct piece, who compiled it and how long that took."""
    if not program.kinds:
        return ""
    rows: list[Sequence[object]] = []
    for kind in program.kinds:
        time = f"{kind.seconds * 1e3:.1f}"
        where = "disk cache" if kind.cached else "compiled"
        rows.append(
            (kind.letter, len(kind.uses), sum(kind.ops.values()), kind.compiler, time, where, kind.key[:12])
        )
    head = ("piece", "uses", "ops", "compiler", "ms", "from", "key")
    lines = [f"Distinct pieces of the {program.name}", table(head, rows, _INDENT)]
    lines += [f"{_INDENT}{kind.letter}: {kind.failure}" for kind in program.kinds if kind.failure is not None]
    return "\n".join(lines)


def captures_text(capture: CaptureReport) -> str:
    """Graph modes, and the plan: sizes, graphs, bytes, what was dropped and why."""
    lines = [
        "Captures",
        f"{_INDENT}decode {capture.decode} (of {', '.join(capture.decode_modes)}), "
        f"prefill {capture.prefill} (of {', '.join(capture.prefill_modes)})",
        f"{_INDENT}steps outside graphs {capture.eager_steps}",
    ]
    if not capture.graphs and not capture.dropped:
        return "\n".join([*lines, _INDENT + "nothing is captured"])
    budget = (
        "" if capture.graph_budget is None else f" of {capture.graph_budget} that the device has room for"
    )
    lines.append(f"{_INDENT}{_count(capture.graphs, 'graph')}{budget}")
    if capture.bytes is not None and capture.pool_bytes is not None and capture.graph_bytes is not None:
        lines[-1] += (
            f", {format_size(capture.bytes)} ({format_size(capture.pool_bytes)} shared, "
            f"{format_size(capture.graph_bytes)} each)"
        )
    lines += [f"{_INDENT}{name}: {listed(sizes)}" for name, sizes in capture.sizes.items()]
    lines += [f"{_INDENT}not {name} {listed(sizes)}: {why}" for name, sizes, why in capture.dropped]
    return "\n".join(lines)


def break_even_text(found: BreakEven) -> str:
    """Up to which size captured prefill pays."""
    lines = ["Break-even of captured prefill", _INDENT + found.note]
    if found.measured:
        rows = [(n, f"{eager:.3f}", f"{graph:.3f}") for n, eager, graph in found.measured]
        lines.append(table(("tokens", "eager ms", "captured ms"), rows, _INDENT))
    return "\n".join(lines)


def choices_text(title: str, choices: Sequence[Choice]) -> str:
    """What there is to choose from, and which package brings it."""
    rows = [(c.name, c.origin, c.note) for c in choices]
    return f"{title}\n" + table(("name", "from", ""), rows, _INDENT)


def listed(sizes: Sequence[int]) -> str:
    """Sizes in brackets."""
    return "[" + ", ".join(map(str, sizes)) + "]"


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
