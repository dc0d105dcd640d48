"""Cuts a flat graph at its splitting ops: pieces, and holes between them.

A piece takes and gives tensors only. No size crosses a cut: a piece that needs one gets the input that
it comes from, and works it out. Everything keeps its order, since operations may write into tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn

from piecework.errors import PieceworkError
from piecework.graph.symbols import SizeWriter, sizes_of, sources

_empty_strided = torch.ops.aten.empty_strided.default


class SplitError(PieceworkError):
    """A graph that can't be cut at an op; the message names the op and says why."""


@dataclass
class PieceGraph:
    """The graph between two holes. `inputs` and `outputs` are nodes of the whole graph.

    The piece's own placeholders and results stand in the same order.
    """

    graph_module: fx.GraphModule
    inputs: list[fx.Node]
    outputs: list[fx.Node]


@dataclass
class Hole:
    """A call between pieces. `args` and `kwargs` hold nodes of the whole graph, and literals.

    `buffer`: a tensor that a piece before it allocated, into which the result must be copied. A fresh
    result would stand at another address each time, and a captured piece would go on reading the old one.
    """

    name: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    node: fx.Node
    buffer: fx.Node | None = None


@dataclass
class SplitGraph:
    """Pieces and holes in the order in which they run; `outputs` are the whole graph's results."""

    parts: list[PieceGraph | Hole]
    placeholders: list[fx.Node]
    outputs: list[fx.Node]
    pieces: list[PieceGraph] = field(init=False)
    holes: list[Hole] = field(init=False)

    def __post_init__(self) -> None:
        self.pieces = [part for part in self.parts if isinstance(part, PieceGraph)]
        self.holes = [part for part in self.parts if isinstance(part, Hole)]


def op_name(target: Any) -> str:
    """Return the name that `splitting_ops` has for a node's target: `piecework::attention`.

    A builtin of torch (scaled_dot_product_attention in a graph of dynamo's) goes by its op's name.
    """
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        packet = target.overloadpacket if isinstance(target, torch._ops.OpOverload) else target
        return str(packet._qualified_op_name)
    name = getattr(target, "__name__", str(target))
    module = getattr(target, "__module__", None) or ""
    return f"aten::{name}" if module.startswith("torch") else f"{module}::{name}"


def split(graph: fx.Graph, splitting_ops: Sequence[str]) -> SplitGraph:
    """Cut `graph`, whose nodes carry their values' shapes in `meta["val"]`, at the ops of these names.

    Raises:
        SplitError: a splitting op gives something else than nothing, one of its arguments or one tensor,
            or takes a size.
    """
    return _Splitter(graph, set(splitting_ops)).run()


class _Splitter:
    def __init__(self, graph: fx.Graph, names: set[str]) -> None:
        self._graph = graph
        self._names = names
        self._placeholders = list(graph.find_nodes(op="placeholder"))
        self._sources = sources(self._placeholders)
        # Where a node's value really comes from: a hole's result is the tensor it wrote.
        self._alias: dict[fx.Node, fx.Node] = {}
        self._runs: list[list[fx.Node] | Hole] = []
        self._run_of: dict[fx.Node, int] = {}

    def run(self) -> SplitGraph:
        self._divide()
        outputs = [self._real(n) for n in self._output_nodes()]
        used = self._last_uses(outputs)
        parts: list[PieceGraph | Hole] = []
        for index, part in enumerate(self._runs):
            if isinstance(part, Hole):
                parts.append(part)
            elif part:
                parts.append(self._piece(index, part, used))
        return SplitGraph(parts, self._placeholders, outputs)

    def _output_nodes(self) -> list[fx.Node]:
        (output,) = self._graph.find_nodes(op="output")
        found = output.args[0]
        nodes = list(found) if isinstance(found, list | tuple) else [found]
        for node in nodes:
            if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), Tensor):
                raise SplitError(f"the graph's result {node} is no tensor")
        return nodes

    def _real(self, node: fx.Node) -> fx.Node:
        while node in self._alias:
            node = self._alias[node]
        return node

    def _divide(self) -> None:
        run: list[fx.Node] = []
        self._runs.append(run)
        for node in list(self._graph.nodes):
            if node.op in ("placeholder", "output") or _is_size(node):
                continue
            if node.op != "call_function":
                raise SplitError(f"the graph has a node {node.name} of kind {node.op}, not call_function")
            if op_name(node.target) in self._names:
                self._runs.append(self._hole(node))
                run = []
                self._runs.append(run)
            else:
                index = len(self._runs) - 1
                if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
                    # Where the tuple is made, so that tensors cross a cut and never a tuple.
                    index = self._run_of.get(node.args[0], index)
                home = self._runs[index]
                assert isinstance(home, list)
                home.append(node)
                self._run_of[node] = index

    def _hole(self, node: fx.Node) -> Hole:
        name = op_name(node.target)
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self._real)
        for used in node.all_input_nodes:
            if not isinstance(used.meta.get("val"), Tensor):
                raise SplitError(f"{name} takes {used.name}, which is no tensor; a size can't cross a cut")
        hole = Hole(name, node.target, tuple(args), kwargs, node)
        value = node.meta.get("val")
        if value is None:
            return hole
        written = _written_argument(node)
        if written is not None:
            self._alias[node] = self._real(written)
        elif isinstance(value, Tensor):
            hole.buffer = self._buffer(node, value)
            self._alias[node] = hole.buffer
        else:
            raise SplitError(
                f"{name} can't be a splitting op: it returns {type(value).__name__}; allowed are nothing, "
                "an argument that it wrote, or one tensor"
            )
        return hole

    def _buffer(self, node: fx.Node, value: Tensor) -> fx.Node:
        """Allocate the result's place in the piece before the hole."""
        with self._graph.inserting_before(node):
            writer = SizeWriter(self._graph, self._sources.__getitem__)
            sizes: list[list[Any]] = [[*value.shape], [*value.stride()]]
            shape, stride = ([writer.write(s) for s in part] for part in sizes)
            made = self._graph.call_function(
                _empty_strided, (shape, stride), {"dtype": value.dtype, "device": value.device}
            )
        made.meta["val"] = value
        run = self._runs[-1]
        assert isinstance(run, list)
        run.append(made)
        self._run_of[made] = len(self._runs) - 1
        return made

    def _last_uses(self, outputs: Sequence[fx.Node]) -> dict[fx.Node, int]:
        """Map each node to the last part that uses it; results of the graph are used after all."""
        last: dict[fx.Node, int] = {}
        for index, part in enumerate(self._runs):
            users = [part.node] if isinstance(part, Hole) else part
            for user in users:
                for node in user.all_input_nodes:
                    last[self._real(node)] = index
            if isinstance(part, Hole) and part.buffer is not None:
                last[part.buffer] = index
        last.update(dict.fromkeys(outputs, len(self._runs)))
        return last

    def _piece(self, index: int, nodes: list[fx.Node], last: dict[fx.Node, int]) -> PieceGraph:
        inside = set(nodes)
        inputs: dict[fx.Node, None] = {}
        symbols: dict[sympy.Symbol, None] = {}
        for node in nodes:
            for used in map(self._real, node.all_input_nodes):
                if _is_size(used):
                    symbols.update(dict.fromkeys(_symbols([used])))
                elif used not in inside:
                    inputs[used] = None
        # Every size in the piece must be the dimension of an input, or nothing could compute it.
        known = sources(list(inputs))
        symbols.update(dict.fromkeys(_symbols([*inputs, *nodes])))
        for symbol in symbols:
            if symbol not in known:
                inputs.setdefault(self._source(symbol, nodes[0]))
                known = sources(list(inputs))
        outputs = [n for n in nodes if last.get(n, -1) > index]
        for node in outputs:
            if not isinstance(node.meta.get("val"), Tensor):
                raise SplitError(f"{node.name} crosses a cut and is no tensor")
        return PieceGraph(self._copy(nodes, list(inputs), outputs), list(inputs), outputs)

    def _source(self, symbol: sympy.Symbol, node: fx.Node) -> fx.Node:
        if symbol not in self._sources:
            raise SplitError(f"{node.name} needs the size {symbol}, which is that of no input")
        return self._sources[symbol][0]

    def _copy(
        self, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
    ) -> fx.GraphModule:
        graph = fx.Graph()
        copies: dict[fx.Node, Any] = {}
        for node in inputs:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)
        found = sources([copies[node] for node in inputs])
        writer = SizeWriter(graph, found.__getitem__)

        def place(node: fx.Node) -> Any:
            node = self._real(node)
            if _is_size(node):
                value = node.meta["val"]
                return writer.write(value) if isinstance(value, torch.SymInt) else value
            return copies[node]

        for node in nodes:
            copies[node] = graph.node_copy(node, place)
        graph.output(tuple(copies[node] for node in outputs))
        return fx.GraphModule(nn.Module(), graph)


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool | int | float)


def _symbols(nodes: Sequence[fx.Node]) -> list[sympy.Symbol]:
    found = {s for node in nodes for expr in sizes_of(node) for s in expr.free_symbols}
    return sorted(found, key=str)


def _written_argument(node: fx.Node) -> fx.Node | None:
    """Return the argument that the op writes and returns, if that is what it returns.

    A view is refused: it has another shape than its argument, and a copy of it would miss later writes.
    """
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    schema = node.target._schema
    if len(schema.returns) != 1 or schema.returns[0].alias_info is None:
        return None
    if not schema.returns[0].alias_info.is_write:
        raise SplitError(f"{op_name(node.target)} can't be a splitting op: it returns a view of its argument")
    names = schema.returns[0].alias_info.before_set
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.before_set & names:
            value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            return value if isinstance(value, fx.Node) else None
    return None
