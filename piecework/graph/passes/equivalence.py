"""What has to be equal for two graphs to compute the same.

Nodes of both graphs get numbers; equal numbers mean the same op on the same inputs. Where a node that
was kept gets an argument with another number than before, the two arguments must be equal: a `Claim`.
From there on they count as one. So every rewrite is one claim, about a small region.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from piecework.graph.passes.aliases import (
    Aliases,
    has_effect,
    inputs_of,
    is_uninitialised,
    is_view,
    written_inputs,
)


@dataclass(frozen=True)
class Claim:
    """`after`, a node of the new graph, has to give what `before` gave; `user` is where that matters."""

    before: Node
    after: Node
    user: str


@dataclass(frozen=True)
class Difference:
    """Two graphs, compared.

    Attributes:
        claims: what must be equal; none if the graphs compute the same in the same way.
        effects: writes were added or removed, or new nodes look at written memory; then only running
            the whole graphs can tell.
        numbers: of every node of both graphs, with claims taken for true.
        names: the first node of the old graph with each number.
    """

    claims: tuple[Claim, ...]
    effects: bool
    numbers: dict[Node, int]
    names: dict[int, str]


class _Numbering:
    """Numbers nodes by what they compute; numbers that are claimed to be equal become one."""

    def __init__(self) -> None:
        self._of: dict[Node, int] = {}
        self._known: dict[Any, int] = {}
        self._parent: dict[int, int] = {}

    def __getitem__(self, node: Node) -> int:
        number = self._of[node]
        while number in self._parent:
            number = self._parent[number]
        return number

    def join(self, a: Node, b: Node) -> None:
        first, second = self[a], self[b]
        if first != second:
            self._parent[second] = first

    def add(self, node: Node, by_name: bool) -> None:
        if node.op == "placeholder" or by_name:
            key: Any = (node.op, node.name, str(node.target))
        elif node.op == "get_attr":
            key = (node.op, str(node.target))
        else:
            arguments = map_arg((node.args, dict(node.kwargs)), lambda n: f"#{self[n]}")
            key = (node.op, node.target, repr(arguments))
        self._of[node] = self._known.setdefault(key, len(self._known))

    def all(self) -> dict[Node, int]:
        return {node: self[node] for node in self._of}


def compare(before: Graph, after: Graph) -> Difference:
    """Find what must be equal for `after` to compute what `before` does."""
    numbering = _Numbering()
    claims: list[Claim] = []
    kept = {node.name: node for node in before.nodes}
    for graph in (before, after):
        aliases = Aliases(graph)
        for node in graph.nodes:
            twin = kept.get(node.name) if graph is after else None
            if twin is not None and _alike(node, twin):
                for old, new in zip(inputs_of(twin), inputs_of(node), strict=True):
                    if numbering[old] != numbering[new]:
                        claims.append(Claim(old, new, node.name))
                        numbering.join(old, new)
            by_name = has_effect(node) or is_uninitialised(node) or aliases.touches_written(node)
            numbering.add(node, by_name and node.op != "output")
    numbers = numbering.all()
    names: dict[int, str] = {}
    for node in before.nodes:
        names.setdefault(numbers[node], node.name)
    return Difference(tuple(claims), _effects_differ(before, after), numbers, names)


def _alike(node: Node, twin: Node) -> bool:
    """Whether two nodes differ at most in which nodes are their arguments."""
    if node.op != twin.op or node.target != twin.target:
        return False

    def shape(n: Node) -> str:
        return repr(map_arg((n.args, dict(n.kwargs)), lambda _: "#"))

    return shape(node) == shape(twin)


def _effects_differ(before: Graph, after: Graph) -> bool:
    known = [{n.name: n for n in graph.nodes if _is_effect(n)} for graph in (before, after)]
    if known[0].keys() != known[1].keys():
        return True
    if any(not _alike(node, known[0][name]) for name, node in known[1].items()):
        return True
    old = {node.name for node in before.nodes}
    aliases = Aliases(after)
    return any(node.name not in old and aliases.touches_written(node) for node in after.nodes)


def _is_effect(node: Node) -> bool:
    return has_effect(node) or is_uninitialised(node)


def write_order(before: Graph, after: Graph) -> str | None:
    """Name a kept node that now runs before or after a write into its memory when it did not; or None."""
    seen = [_writes_before(graph) for graph in (before, after)]
    kept = seen[0].keys() & seen[1].keys()
    writers = {name for name, _ in kept}
    for key in sorted(kept):
        earlier = [[w for w in s[key] if w in writers] for s in seen]
        if earlier[0] != earlier[1]:
            return f"{key[0]} ran after the writes {earlier[0]} of {key[1]}, and now after {earlier[1]}"
    return None


def shared_memory(before: Graph, after: Graph) -> str | None:
    """Name a kept node that reads or writes other memory than before, where somebody writes it; or None.

    A value that was computed keeps what its inputs held at that moment. A view put in its place shows what
    is written later, and who writes into it writes into its source; a copy in a view's place does neither.
    """
    old, new = _Memory(before), _Memory(after)
    # Of a write that the pass takes away or makes, only running both graphs tells whether that is right.
    writers = old.writers & new.writers
    if not writers:
        return None
    kept = {node.name: node for node in before.nodes}
    for node in after.nodes:
        twin = kept.get(node.name)
        if twin is None or not _alike(node, twin):
            continue
        writes = {n.name for n in written_inputs(node)}
        for was, now in zip(inputs_of(twin), inputs_of(node), strict=True):
            roots = old.roots(was), new.roots(now)
            for name in sorted((roots[0] ^ roots[1]) & kept.keys()):
                gained = name in roots[1]
                then = writers & old.history(was if gained else twin, name)
                today = writers & new.history(node if gained else now, name)
                if (now.name in writes and node.name in writers) or then != today:
                    whose = "memory" if gained else "no longer memory"
                    return f"{node.name} gets {now.name} for {was.name}: {whose} of {name}, which is written"
    return None


class _Memory:
    """The memory of a graph's nodes and who writes it when, by names, which two graphs have in common."""

    def __init__(self, graph: Graph) -> None:
        self.aliases = Aliases(graph)
        self._place = {node: index for index, node in enumerate(graph.nodes)}
        self._written: dict[str, list[Node]] = {}
        for writer, memory in self.aliases.writes:
            for root in memory:
                self._written.setdefault(root.name, []).append(writer)
        self.writers = {writer.name for writer, _ in self.aliases.writes}

    def roots(self, node: Node) -> set[str]:
        """The owners of a node's memory."""
        return {root.name for root in self.aliases.roots(node)}

    def history(self, node: Node, root: str) -> set[str]:
        """Who wrote the memory of `root` before `node`."""
        return {w.name for w in self._written.get(root, ()) if self._place[w] < self._place[node]}


def _writes_before(graph: Graph) -> dict[tuple[str, str], list[str]]:
    """For every node and every written memory that it touches: who wrote it before."""
    aliases = Aliases(graph)
    writers = dict(aliases.writes)
    history: dict[Node, list[str]] = {root: [] for root in aliases.written}
    found: dict[tuple[str, str], list[str]] = {}
    for node in graph.nodes:
        memory = aliases.roots(node).union(*(aliases.roots(n) for n in inputs_of(node)))
        for root in memory & aliases.written:
            found[node.name, root.name] = list(history[root])
        for root in writers.get(node, frozenset()):
            history[root].append(node.name)
    return found


class Regions:
    """Cuts out, for each claim, the nodes to compute on both sides; what they need besides is shared."""

    def __init__(self, before: Graph, after: Graph, difference: Difference) -> None:
        self._numbers = difference.numbers
        self._order = {node: index for graph in (before, after) for index, node in enumerate(graph.nodes)}
        self._first: dict[int, Node] = {}
        for node in before.nodes:
            self._first.setdefault(self._numbers[node], node)
        self._shared = self._first.keys() & {self._numbers[node] for node in after.nodes}

    def of(self, claim: Claim) -> tuple[list[Node], list[Node]]:
        """The nodes to compute for the old and the new value, in order.

        Both sides go back to values that both graphs have, and to the same ones: where one side needs a
        value that the other does not, that value is computed too, the latest first. Views are always
        computed: what a view shows of another shared value is no free choice.
        """
        forced: set[int] = set()
        while True:
            before, after = (self._cone(root, forced) for root in (claim.before, claim.after))
            needs = [self._needs(side, root) for side, root in ((before, claim.before), (after, claim.after))]
            unequal = [n for n in needs[0] ^ needs[1] if n in self._first and _computed(self._first[n])]
            open_ = [n for n in unequal if n in self._shared and n not in forced]
            if not open_:
                return before, after
            forced.add(max(open_, key=lambda n: self._order[self._first[n]]))

    def _cone(self, root: Node, forced: set[int]) -> list[Node]:
        region: set[Node] = set()
        stack = [root] if _computed(root) else []
        while stack:
            node = stack.pop()
            if node in region or (node is not root and self._stops(node, forced)):
                continue
            region.add(node)
            stack.extend(inputs_of(node))
        return sorted(region, key=lambda node: self._order[node])

    def _stops(self, node: Node, forced: set[int]) -> bool:
        number = self._numbers[node]
        free = number in self._shared and number not in forced and not is_view(node)
        return free or not _computed(node)

    def _needs(self, side: list[Node], root: Node) -> set[int]:
        inside = set(side)
        outer = {n for node in side for n in inputs_of(node)} - inside if side else {root}
        return {self._numbers[node] for node in outer}


def _computed(node: Node) -> bool:
    """Whether a node's value follows from its arguments alone."""
    return node.op == "call_function" and not has_effect(node) and not is_uninitialised(node)
