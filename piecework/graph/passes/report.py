"""What the passes did: by pass, as objects, as plain values for JSON, and as a table."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from torch.fx import Graph, Node

from piecework.graph.passes.arguments import op_name
from piecework.graph.passes.fakes import same_call

Status = Literal["applied", "no match", "disabled", "skipped", "refused", "failed"]


@dataclass(frozen=True)
class Rewrite:
    """Nodes that went and nodes that came, one line of text each."""

    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass
class PassReport:
    """One pass on one graph.

    Attributes:
        status: `applied`, `no match`, `disabled`, `skipped` (device or dtype), `refused` (verification
            measured a larger error than the pass declares), `failed` (it raised, or broke the graph);
            after the last two the graph is as before the pass.
        reason: why, for every status but `applied` and `no match`.
        matches: how often it matched. refused: how often it nearly did, by reason.
        ops_before, ops_after: the number of calls by op.
        ms: milliseconds, without verification; verify_ms: those of verification.
        bound: what the pass declares; error: what verification measured, None if it did not run.
        expected: how many matches were expected, as text; None for any number. missed: there were others.
    """

    name: str
    status: Status
    reason: str = ""
    matches: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    ops_before: dict[str, int] = field(default_factory=dict)
    ops_after: dict[str, int] = field(default_factory=dict)
    ms: float = 0.0
    verify_ms: float = 0.0
    bound: str = "bitwise"
    error: float | None = None
    expected: str | None = None
    missed: bool = False
    rewrites: list[Rewrite] = field(default_factory=list)

    @property
    def bitwise(self) -> bool:
        """Whether the pass declares that it changes no bit."""
        return self.bound == "bitwise"


@dataclass
class Report:
    """All passes of one `apply`, in order."""

    passes: list[PassReport] = field(default_factory=list)

    def __getitem__(self, name: str) -> PassReport:
        for entry in self.passes:
            if entry.name == name:
                return entry
        raise KeyError(f"no pass {name!r}; there are {', '.join(p.name for p in self.passes)}")

    @property
    def matches(self) -> dict[str, int]:
        """The number of matches by pass."""
        return {entry.name: entry.matches for entry in self.passes}

    @property
    def not_bitwise(self) -> list[str]:
        """The passes that were applied and may have changed bits."""
        return [p.name for p in self.passes if p.status == "applied" and not p.bitwise]

    @property
    def ms(self) -> float:
        """Milliseconds of all passes, without verification."""
        return sum(entry.ms for entry in self.passes)

    def to_dict(self) -> list[dict[str, Any]]:
        """Plain values for JSON; an infinite error is a string."""
        entries = [asdict(entry) for entry in self.passes]
        for entry in entries:
            if entry["error"] is not None and entry["error"] == float("inf"):
                entry["error"] = "inf"
        return entries

    def table(self) -> str:
        """The passes as lines of text, with why a pass did nothing."""
        head = ("pass", "status", "matches", "ops", "ms", "bound", "error")
        rows = [head]
        for p in self.passes:
            ops = f"{sum(p.ops_before.values())} -> {sum(p.ops_after.values())}" if p.ops_before else ""
            measured = "" if p.error is None else f"{p.error:.2g}"
            rows.append((p.name, p.status, str(p.matches), ops, f"{p.ms:.1f}", p.bound, measured))
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = []
        for row, entry in zip(rows, [None, *self.passes], strict=True):
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append("  ".join(cells).rstrip())
            if entry is not None:
                notes = [entry.reason] if entry.reason else []
                notes += [f"{n} times not: {reason}" for reason, n in entry.refused.items()]
                lines += [f"    {note}" for note in notes]
        return "\n".join(lines)


def histogram(graph: Graph) -> dict[str, int]:
    """The number of calls by op, without the unpacking of results."""
    counts = Counter(op_name(n.target) for n in graph.nodes if n.op == "call_function")
    counts.pop("getitem", None)
    return dict(sorted(counts.items()))


def describe(node: Node) -> str:
    """A node as one line: `add = aten::add(embedding, linear_1)`."""
    arguments = [str(a) for a in node.args] + [f"{k}={v}" for k, v in node.kwargs.items()]
    return f"{node.name} = {op_name(node.target)}({', '.join(arguments)})"


def rewritten(before: Graph, after: Graph) -> Rewrite:
    """All nodes that went or came, as one rewrite."""
    old, new = ({n.name: n for n in g.nodes if n.op == "call_function"} for g in (before, after))
    gone = [n for name, n in old.items() if name not in new or not same_call(n, new[name])]
    came = [n for name, n in new.items() if name not in old or not same_call(n, old[name])]
    return Rewrite(tuple(map(describe, gone)), tuple(map(describe, came)))
