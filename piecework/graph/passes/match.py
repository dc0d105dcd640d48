"""Finds the places in a graph where a pattern fits.

Literals must be equal, arguments are compared by name with defaults filled in, dimensions and view sizes
by what they mean in the graph. A variable may stand for a literal, two for one node, one only for one.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from piecework.graph.passes.arguments import bind, is_dim, positive_dim, positive_dims, rank, same_literal
from piecework.graph.passes.base import Match
from piecework.graph.passes.pattern import Pattern, PatternOp, Var, leaves

_COMMUTATIVE = frozenset({"aten::add", "aten::mul", "aten::maximum", "aten::minimum"})
_VIEW = "aten::view"

Goal = tuple[Any, Any]
"""A part of the pattern, and the part of the graph that it has to be."""


@dataclass(frozen=True)
class _State:
    """What is decided so far; never changed, so that going back is forgetting."""

    variables: dict[Var, Any]
    ops: dict[PatternOp, Node]

    def with_variable(self, var: Var, value: Any) -> _State:
        return _State({**self.variables, var: value}, self.ops)

    def with_op(self, op: PatternOp, node: Node) -> _State:
        return _State(self.variables, {**self.ops, op: node})


class Matcher:
    """Finds one pattern in one graph, which must not change meanwhile."""

    def __init__(self, pattern: Pattern, graph: Graph) -> None:
        self.pattern = pattern
        self._by_target: dict[Any, list[Node]] = defaultdict(list)
        for node in graph.nodes:
            if node.op == "call_function":
                self._by_target[_packet(node.target)].append(node)

    def anchors(self) -> list[Node]:
        """The nodes that one op of the pattern, the one that is rarest in the graph, could be."""
        self._anchor = min(self.pattern.ops, key=lambda op: len(self._by_target[_packet(op.target)]))
        return list(self._by_target[_packet(self._anchor.target)])

    def at(self, anchor: Node) -> Iterator[Match]:
        """Every way in which the pattern fits with its rarest op at `anchor`."""
        for state in self._solve([(self._anchor, anchor)], _State({}, {})):
            bound = {var.name: state.variables[var] for var in self.pattern.variables}
            nodes = [state.ops[op] for op in self.pattern.ops]
            yield Match(bound, nodes, [state.ops[op] for op in self.pattern.outputs])

    def _solve(self, goals: list[Goal], state: _State) -> Iterator[_State]:
        if not goals:
            reach = self._next(state)
            if reach is None:
                yield state
                return
            op, neighbour = reach
            for user in list(neighbour.users):
                yield from self._solve([(op, user)], state)
            return
        (pattern, found), rest = goals[0], goals[1:]
        if isinstance(pattern, Var):
            bound = _bind_variable(pattern, found, state)
            if bound is not None:
                yield from self._solve(rest, bound)
        elif isinstance(pattern, PatternOp):
            if pattern in state.ops:
                if state.ops[pattern] is found:
                    yield from self._solve(rest, state)
            elif isinstance(found, Node) and found not in state.ops.values():
                for parts in _ways(pattern, found):
                    yield from self._solve(parts + rest, state.with_op(pattern, found))
        elif isinstance(pattern, list | tuple):
            if isinstance(found, list | tuple) and len(found) == len(pattern):
                yield from self._solve([*zip(pattern, found, strict=True), *rest], state)
        elif same_literal(pattern, found):
            yield from self._solve(rest, state)

    def _next(self, state: _State) -> tuple[PatternOp, Node] | None:
        """An op that is still to be found, and a node it must use: one of a found op, or of a variable."""
        by_variable: tuple[PatternOp, Node] | None = None
        for op in self.pattern.ops:
            if op in state.ops:
                continue
            for leaf in leaves(op):
                if leaf in state.ops:
                    return op, state.ops[leaf]
                if isinstance(leaf, Var) and isinstance(state.variables.get(leaf), Node):
                    by_variable = by_variable or (op, state.variables[leaf])
        return by_variable


def _packet(target: Any) -> Any:
    return target.overloadpacket if isinstance(target, OpOverload) else target


def _bind_variable(var: Var, found: Any, state: _State) -> _State | None:
    if var in state.variables:
        return state if same_literal(state.variables[var], found) else None
    is_tensor = isinstance(found, Node) and isinstance(found.meta.get("val"), torch.Tensor)
    if (var.kind == "tensor" and not is_tensor) or (var.kind == "literal" and isinstance(found, Node)):
        return None
    return state.with_variable(var, found)


def _ways(op: PatternOp, node: Node) -> list[list[Goal]]:
    """The ways in which a pattern's op can be this node, each as the goals that remain."""
    if op.target is operator.getitem:
        if node.target is not operator.getitem or node.args[1] != op.args[1]:
            return []
        return [[(op.args[0], node.args[0])]]
    target = node.target
    if not isinstance(target, OpOverload):
        return []
    if op.target not in (target, target.overloadpacket):
        return []
    found = bind(target, node.args, dict(node.kwargs))
    try:
        wanted = bind(target, op.args, op.kwargs)
    except TypeError:
        return []
    found = positive_dims(target, found)
    dims = rank(target, found)
    wanted = {name: positive_dim(v, dims) if is_dim(name) else v for name, v in wanted.items()}
    name = target._schema.name
    if name == _VIEW and isinstance(wanted["size"], list):
        sizes = _view_sizes(wanted["size"], found["size"], node)
        if sizes is None:
            return []
        wanted["size"], found["size"] = sizes
    ways = [[(wanted[key], found[key]) for key in wanted]]
    if name in _COMMUTATIVE and found.get("alpha", 1) == 1:
        first, second, *others = wanted
        swapped = [(wanted[first], found[second]), (wanted[second], found[first])]
        ways.append(swapped + [(wanted[key], found[key]) for key in others])
    return ways


def _view_sizes(wanted: list[Any], found: list[Any], node: Node) -> tuple[list[Any], list[Any]] | None:
    """Compare view sizes by the shape that they give: -1 in the pattern is whatever is left over."""
    shape = node.meta["val"].shape
    if len(wanted) != len(shape) or len(found) != len(shape):
        return None
    pairs = [
        (w, int(s) if isinstance(s, int) else f)
        for w, f, s in zip(wanted, found, shape, strict=True)
        if not (isinstance(w, int) and w == -1)
    ]
    return [w for w, _ in pairs], [f for _, f in pairs]
