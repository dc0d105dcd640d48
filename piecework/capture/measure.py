"""What captures cost, measured before the KV cache takes the rest of the memory."""

from __future__ import annotations

from collections.abc import Sequence

from piecework.capture.plan import Cost, Wish, plan_captures
from piecework.capture.runner import Captured, GraphRunner


def measure(runner: GraphRunner) -> Cost:
    """Capture the largest sizes of each program, note what they take, and release them.

    The largest size of a program brings the pool's memory and the static results; the next one uses
    them again, so what it takes is the graphs' own.
    """
    first_two = [Wish(wish.name, wish.sizes[-2:], wish.graphs_per_size) for wish in runner.wishes]
    plan = plan_captures(first_two, graph_budget=runner.device.graph_budget)
    try:
        return cost_of(runner.capture(plan))
    finally:
        runner.release()


def cost_of(captured: Sequence[Captured]) -> Cost:
    """Work out the cost of one graph, and of what all share, from sizes in the order of capture."""
    first: dict[str, Captured] = {}
    graph = 0
    for size in captured:
        if first.setdefault(size.name, size) is not size:
            graph = max(graph, -(-size.bytes // size.graphs))
    pool = sum(max(0, size.bytes - graph * size.graphs) for size in first.values())
    return Cost(pool, graph)
