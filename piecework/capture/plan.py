"""The capture plan: which sizes are captured, decided from budgets before anything is captured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Wish:
    """Sizes that one program should be captured at, and the graphs that each of them takes.

    A piecewise program of L layers takes L + 1 graphs a size, a full one takes 1, a head takes 1.
    """

    name: str
    sizes: tuple[int, ...]
    graphs_per_size: int


@dataclass(frozen=True)
class Cost:
    """Bytes that captures take: `pool`, once, and `graph`, for each graph; measured on the device."""

    pool: int
    graph: int

    def of(self, graphs: int) -> int:
        """Bytes of that many graphs."""
        return self.pool + self.graph * graphs if graphs else 0


@dataclass(frozen=True)
class Dropped:
    """A size that doesn't fit, and which budget it doesn't fit into."""

    name: str
    size: int
    reason: str


@dataclass(frozen=True)
class CapturePlan:
    """What will be captured: sorted sizes by program, the graphs in all, their bytes (None: not measured)."""

    sizes: Mapping[str, tuple[int, ...]]
    graphs: int
    bytes: int | None
    dropped: tuple[Dropped, ...] = ()

    def lines(self) -> list[str]:
        """Say it in words, for logs and `explain`: one line for the sum, and one per reason for drops."""
        parts = ", ".join(f"{name} {_listed(sizes)}" for name, sizes in self.sizes.items())
        size = "" if self.bytes is None else f", {self.bytes / 2**20:.1f} MiB"
        said = [f"captures {self.graphs} graphs{size}: {parts}"]
        for name, reason in dict.fromkeys((drop.name, drop.reason) for drop in self.dropped):
            gone = sorted(d.size for d in self.dropped if (d.name, d.reason) == (name, reason))
            said.append(f"does not capture {name} {_listed(gone)}: {reason}")
        return said


def _listed(sizes: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, sizes)) + "]"


def plan_captures(
    wishes: Sequence[Wish],
    *,
    graph_budget: int | None,
    memory_budget: int | None = None,
    cost: Cost | None = None,
) -> CapturePlan:
    """Keep as many sizes as the budgets allow (None: no limit; memory counts only with a `cost`).

    The size that goes first is the one whose batches lose least by padding to the next, for each graph
    that it frees. A program's largest size goes last, since larger batches run uncaptured.
    """
    kept = {wish.name: sorted(set(wish.sizes)) for wish in wishes}
    each = {wish.name: wish.graphs_per_size for wish in wishes}
    dropped: list[Dropped] = []
    while True:
        graphs = sum(len(sizes) * each[name] for name, sizes in kept.items())
        reason = _excess(graphs, graph_budget, memory_budget, cost)
        candidates = [
            (_loss(sizes, i) / each[name], name, size)
            for name, sizes in kept.items()
            for i, size in enumerate(sizes)
            if each[name]
        ]
        if reason is None or not candidates:
            break
        _, name, size = min(candidates)
        kept[name].remove(size)
        dropped.append(Dropped(name, size, reason))
    sizes = {name: tuple(found) for name, found in kept.items()}
    return CapturePlan(sizes, graphs, None if cost is None else cost.of(graphs), tuple(dropped))


def _excess(
    graphs: int, graph_budget: int | None, memory_budget: int | None, cost: Cost | None
) -> str | None:
    if graph_budget is not None and graphs > graph_budget:
        return f"the device has room for {graph_budget} graphs"
    if memory_budget is not None and cost is not None and cost.of(graphs) > memory_budget:
        return f"graphs may take {memory_budget / 2**20:.1f} MiB"
    return None


def _loss(sizes: Sequence[int], i: int) -> float:
    """Share of padding that batches get without size number i; infinite rows, so to say, for the last."""
    if i == len(sizes) - 1:
        return float(2 + sizes[i])
    return (sizes[i + 1] - sizes[i]) / sizes[i + 1]
