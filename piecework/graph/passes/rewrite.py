"""Replaces what a pattern matched, where that is safe."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from piecework.graph.passes.aliases import Aliases
from piecework.graph.passes.base import Match, Outcome, Pass, PassContext
from piecework.graph.passes.canonicalise import canonicalise
from piecework.graph.passes.errors import PatternError
from piecework.graph.passes.fakes import fake_mode, same_result, settle, signature
from piecework.graph.passes.match import Matcher
from piecework.graph.passes.pattern import Pattern, read_pattern
from piecework.graph.passes.report import Rewrite, describe
from piecework.graph.symbols import symbolic_sizes


@dataclass(frozen=True, kw_only=True)
class PatternPass(Pass):
    """Replaces what `pattern` computes by what `replacement` does.

    Both are plain functions with parameters of the same names, that return as many tensors. What a
    parameter of the pattern meets may be a tensor or a literal; the replacement gets tensors to compute
    with and literals as they are. `where(match)` may look at shapes and dtypes and say no. Several patterns
    are several spellings, tried in their order; a parameter that only some have needs a default in the
    replacement.
    """

    pattern: Callable[..., Any] | Sequence[Callable[..., Any]]
    replacement: Callable[..., Any]
    where: Callable[[Match], bool] | None = None

    def __post_init__(self) -> None:
        patterns = (self.pattern,) if callable(self.pattern) else tuple(self.pattern)
        read = tuple(read_pattern(self.name, p) for p in patterns)
        for pattern in read:
            try:
                inspect.signature(self.replacement).bind(**{v.name: None for v in pattern.variables})
            except TypeError as error:
                names = ", ".join(v.name for v in pattern.variables)
                raise PatternError(self.name, f"replacement can't be called with {names}: {error}") from None
        object.__setattr__(self, "_patterns", read)

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        """The patterns as graphs."""
        found: tuple[Pattern, ...] = self._patterns  # type: ignore[attr-defined]
        return found

    def run(self, graph: Graph, context: PassContext) -> Outcome:
        """Replace every match that does not overlap with an earlier one."""
        total = Outcome()
        for pattern in self.patterns:
            done = _Sweep(self, pattern, graph).run()
            total.matches += done.matches
            total.refused += done.refused
            total.rewrites += done.rewrites
        return total


class _Sweep:
    """One pattern, once over one graph."""

    def __init__(self, owner: PatternPass, pattern: Pattern, graph: Graph) -> None:
        self._owner, self._graph = owner, graph
        self._matcher = Matcher(pattern, graph)
        self._nodes = list(graph.nodes)
        self._order: dict[Node, float] = {node: index for index, node in enumerate(self._nodes)}
        self._expanded: dict[Any, GraphModule] = {}
        self._replaced: dict[Node, Node] = {}
        self._erased: set[Node] = set()
        self._outcome = Outcome()

    def run(self) -> Outcome:
        taken: set[Node] = set()
        accepted: list[Match] = []
        for anchor in self._matcher.anchors():
            reason = None
            for match in self._matcher.at(anchor):
                refusal = "overlaps an earlier match" if taken & set(match.nodes) else self._refusal(match)
                if refusal is None:
                    accepted.append(match)
                    taken |= set(match.nodes)
                    reason = None
                    break
                reason = reason or refusal
            if reason is not None:
                self._outcome.refused[reason] += 1
        for match in sorted(accepted, key=self._place):
            self._replace(match)
        return self._outcome

    def _refusal(self, match: Match) -> str | None:
        """Why a match must be left alone; None if it need not."""
        covered = set(match.nodes)
        for node in match.nodes:
            others = set(node.users) - covered
            if others and node not in match.outputs:
                return f"the intermediate result of {_short(node)} has another user"
        if not self._inputs_ready(match):
            return "a result is used before all inputs are there"
        if self._crosses_write(match):
            return "memory that it reads or returns is written in between"
        if self._owner.where is not None and not self._owner.where(match):
            return "its condition does not hold"
        expanded = self._expand(match)
        results = _results(expanded)
        for old, new in zip(match.outputs, results, strict=True):
            if not same_result(old.meta["val"], new.meta["val"]):
                return f"the replacement of {_short(old)} has another shape or dtype"
        if self._shares_written(match, expanded):
            return "its result would share memory that is written afterwards"
        return None

    def _place(self, match: Match) -> int:
        """The index in the old order before which the replacement goes: where the first result is used,
        or right behind the match."""
        covered = set(match.nodes)
        users = [self._order[u] for out in match.outputs for u in out.users if u not in covered]
        last = max(self._order[n] for n in match.nodes)
        return int(min([*users, last + 1]))

    def _inputs_ready(self, match: Match) -> bool:
        place = self._place(match)
        inputs = [self._replaced.get(n, n) for n in _bound_nodes(match)]
        return all(self._order[n] < place for n in inputs)

    @functools.cached_property
    def _aliases(self) -> Aliases:
        # Made when the first match asks, and before the first replacement.
        return Aliases(self._graph)

    def _crosses_write(self, match: Match) -> bool:
        """Whether a write could see, or be seen by, the moved computation at another moment than before."""
        if not self._aliases.writes:
            return False
        involved = [*match.nodes, *_bound_nodes(match)]
        memory = frozenset[Node]().union(*(self._aliases.roots(n) for n in involved))
        returned = frozenset[Node]().union(*(self._aliases.roots(n) for n in match.outputs))
        start = min(self._order[n] for n in match.nodes)
        end = max(*(self._order[n] for n in match.nodes), self._place(match))
        for writer, written in self._aliases.writes:
            when = self._order[writer]
            harmless = when < start or (when >= end and not written & returned)
            if written & memory and not harmless:
                return True
        return False

    def _shares_written(self, match: Match, expanded: GraphModule) -> bool:
        """Whether a result would be a view of an input that is written from there on, or would be written."""
        if not self._aliases.writes:
            return False
        inside = Aliases(expanded.graph)
        shared = frozenset[Node]().union(*map(inside.roots, _results(expanded)))
        inputs = zip(expanded.graph.find_nodes(op="placeholder"), _bound_nodes(match), strict=True)
        memory = [self._aliases.roots(bound) for placeholder, bound in inputs if placeholder in shared]
        if not memory:
            return False
        involved = frozenset[Node]().union(*memory, *map(self._aliases.roots, match.outputs))
        start = min(self._order[n] for n in match.nodes)
        return any(w & involved and self._order[writer] >= start for writer, w in self._aliases.writes)

    def _expand(self, match: Match) -> GraphModule:
        """The replacement as a graph for values like this match's; one for all matches that are alike."""
        key = tuple(
            (name, signature(match.value(name)) if isinstance(bound, Node) else ("literal", repr(bound)))
            for name, bound in match.bound.items()
        )
        if key not in self._expanded:
            self._expanded[key] = expand(self._owner.name, self._owner.replacement, match, self._graph)
        return self._expanded[key]

    def _replace(self, match: Match) -> None:
        if not self._inputs_ready(match):
            self._outcome.refused["a result is used before all inputs are there"] += 1
            return
        index = self._place(match)
        place = next(node for node in self._nodes[index:] if node not in self._erased)
        # What an earlier replacement returned may be an input of this one.
        inputs = iter([self._replaced.get(n, n) for n in _bound_nodes(match)])
        expanded = self._expand(match)
        gone = tuple(map(describe, match.nodes))
        mapping: dict[Node, Node] = {}
        came: list[str] = []
        with self._graph.inserting_before(place):
            for node in expanded.graph.nodes:
                if node.op == "placeholder":
                    mapping[node] = next(inputs)
                elif node.op == "call_function":
                    made = mapping[node] = self._graph.node_copy(node, lambda n: mapping[n])
                    made.meta = _origin(match)
                    settle(made, node.meta["val"])
                    self._order[made] = index - 0.5
                    came.append(describe(made))
        for old, new in zip(match.outputs, _results(expanded), strict=True):
            old.replace_all_uses_with(mapping[new])
            self._replaced[old] = mapping[new]
        for node in sorted(match.nodes, key=lambda n: self._order[n], reverse=True):
            self._graph.erase_node(node)
            self._erased.add(node)
        self._outcome.matches += 1
        self._outcome.rewrites.append(Rewrite(gone, tuple(came)))


def expand(name: str, replacement: Callable[..., Any], match: Match, graph: Graph) -> GraphModule:
    """Trace a replacement on the fake values of one match: its nodes are placeholders, literals are fixed."""
    names = [key for key, bound in match.bound.items() if isinstance(bound, Node)]
    literals = {key: bound for key, bound in match.bound.items() if key not in names}

    def call(*values: Any) -> tuple[Any, ...]:
        result = replacement(**dict(zip(names, values, strict=True)), **literals)
        return tuple(result) if isinstance(result, tuple | list) else (result,)

    try:
        with fake_mode(graph), symbolic_sizes(), torch.no_grad():
            made: GraphModule = make_fx(call, pre_dispatch=True)(*(match.value(key) for key in names))
    except Exception as error:
        raise PatternError(name, f"replacement fails: {type(error).__name__}: {error}") from error
    for node in made.graph.nodes:
        if node.op == "get_attr":
            raise PatternError(name, "replacement makes a constant tensor; pass it in as a parameter")
    canonicalise(made.graph)
    if len(_results(made)) != len(match.outputs):
        raise PatternError(
            name, f"replacement returns {len(_results(made))} results, pattern {len(match.outputs)}"
        )
    return made


def _results(expanded: GraphModule) -> list[Node]:
    output = next(node for node in expanded.graph.nodes if node.op == "output")
    results: Any = output.args[0]
    return list(results)


def _bound_nodes(match: Match) -> list[Node]:
    return [bound for bound in match.bound.values() if isinstance(bound, Node)]


def _origin(match: Match) -> dict[str, Any]:
    """Where in the model the replaced nodes came from, for messages."""
    meta = match.outputs[0].meta
    return {key: meta[key] for key in ("stack_trace", "nn_module_stack") if key in meta}


def _short(node: Node) -> str:
    return str(node.target).removesuffix(".default")
