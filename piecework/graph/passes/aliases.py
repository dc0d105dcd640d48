"""Which nodes share memory, which write it, and which may be dropped or merged."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from piecework.graph.passes.arguments import is_getitem


def inputs_of(node: Node) -> list[Node]:
    """The nodes in a node's arguments, in their order and with repetitions."""
    found: list[Node] = []

    def note(value: Any) -> Any:
        if isinstance(value, Node):
            found.append(value)
        return value

    map_aggregate((node.args, node.kwargs), note)
    return found


@dataclass(frozen=True)
class _Traits:
    """What an op's schema says: which arguments it writes, and which it may return views of."""

    writes: frozenset[str]
    views: frozenset[str]
    effect: bool
    positional: tuple[str, ...]


@functools.cache
def _traits(target: OpOverload) -> _Traits:
    schema = target._schema
    returned = {name for r in schema.returns if r.alias_info is not None for name in r.alias_info.before_set}
    aliased = [(a.name, a.alias_info) for a in schema.arguments if a.alias_info is not None]
    writes = frozenset(name for name, info in aliased if info.is_write)
    if target is torch.ops.aten.detach_.default:
        writes = frozenset()  # it writes nothing but autograd's notes
    return _Traits(
        writes=writes,
        views=frozenset(name for name, info in aliased if returned & set(info.before_set)),
        effect=bool(writes) or not schema.returns or torch.Tag.nondeterministic_seeded in target.tags,
        positional=tuple(a.name for a in schema.arguments if not a.kwarg_only),
    )


def _named(node: Node, names: frozenset[str], positional: tuple[str, ...]) -> list[Node]:
    """The nodes in those arguments of a call that have one of the names."""
    if not names:
        return []
    values = [value for name, value in zip(positional, node.args, strict=False) if name in names]
    values += [value for name, value in node.kwargs.items() if name in names]
    return [leaf for value in values for leaf in _flat(value) if isinstance(leaf, Node)]


def written_inputs(node: Node) -> list[Node]:
    """The arguments that a node writes into; for a call that torch can't describe, all of them."""
    if node.op != "call_function" or is_getitem(node):
        return []
    if not isinstance(node.target, OpOverload):
        plain = getattr(node.target, "__module__", "") in ("_operator", "math")
        return [] if plain or node.target in _SYMBOLIC else inputs_of(node)
    traits = _traits(node.target)
    return _named(node, traits.writes, traits.positional)


_SYMBOLIC = frozenset({torch.sym_max, torch.sym_min, torch.sym_not, torch.sym_float, torch.sym_int})


def has_effect(node: Node) -> bool:
    """Whether a call must keep its place: it writes, checks, draws random numbers, or is unknown."""
    if node.op != "call_function" or is_getitem(node):
        return False
    if not isinstance(node.target, OpOverload):
        return bool(written_inputs(node))
    return _traits(node.target).effect


def is_uninitialised(node: Node) -> bool:
    """Whether a node hands out memory whose contents somebody else will write."""
    if not isinstance(node.target, OpOverload):
        return False
    name = node.target._schema.name.removeprefix("aten::")
    return name.startswith(("empty", "new_empty"))


def viewed_inputs(node: Node) -> list[Node]:
    """The arguments whose memory a node's result shares, or may share (`reshape`, `contiguous`)."""
    if node.op != "call_function":
        return []
    if is_getitem(node):
        source = node.args[0]
        return [source] if isinstance(source, Node) else []
    if not isinstance(node.target, OpOverload):
        return written_inputs(node)
    traits = _traits(node.target)
    return _named(node, traits.views, traits.positional)


def is_view(node: Node) -> bool:
    """Whether a node's result is, or may be, a part of one of its arguments."""
    if is_getitem(node):
        source = node.args[0]
        return isinstance(source, Node) and is_view(source)
    return bool(viewed_inputs(node))


class Aliases:
    """The memory behind each node of a graph, by the nodes that own it.

    Two placeholders are taken to be different memory; a weight that is tied is never written.
    """

    def __init__(self, graph: Graph) -> None:
        self._roots: dict[Node, frozenset[Node]] = {}
        self.writes: list[tuple[Node, frozenset[Node]]] = []
        self.written: set[Node] = set()
        constants: dict[str, Node] = {}
        for node in graph.nodes:
            if node.op == "get_attr":
                self._roots[node] = frozenset({constants.setdefault(str(node.target), node)})
                continue
            viewed = [self._roots[n] for n in viewed_inputs(node)]
            self._roots[node] = frozenset[Node]().union(*viewed) if viewed else frozenset({node})
            targets = written_inputs(node)
            if targets:
                memory = frozenset[Node]().union(*(self._roots[n] for n in targets))
                self.writes.append((node, memory))
                self.written |= memory

    def roots(self, node: Node) -> frozenset[Node]:
        """The nodes that own the memory of `node`'s result; the node itself if that is fresh."""
        return self._roots[node]

    def touches_written(self, node: Node) -> bool:
        """Whether the node has, reads or writes memory that something in the graph writes."""
        if self._roots[node] & self.written:
            return True
        return any(self._roots[n] & self.written for n in inputs_of(node))


def _flat(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [leaf for v in value for leaf in _flat(v)]
    return [value]
