"""The compiler that doesn't: a piece becomes the Python that its graph is, written out once.

Named ops are called as the functions that implement them, and common torch operations through torch's
own bindings; neither goes through the dispatcher's slow Python entry, and there is no interpreter.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from piecework.compile.base import CompileContext
from piecework.compile.source import SourcePiece
from piecework.graph.lower import direct

_aten = torch.ops.aten
# The same operation with the same arguments; a call costs a third of the overload's.
_BINDINGS: dict[Any, Callable[..., Any]] = {
    _aten.view.default: Tensor.view,
    _aten.reshape.default: Tensor.reshape,
    _aten.split_with_sizes.default: torch.split_with_sizes,
    _aten.empty_like.default: torch.empty_like,
    _aten.add.Tensor: torch.add,
    _aten.sub.Tensor: torch.sub,
    _aten.mul.Tensor: torch.mul,
    _aten.div.Tensor: torch.div,
    _aten.cat.default: torch.cat,
    _aten.unsqueeze.default: torch.unsqueeze,
    _aten.squeeze.dim: torch.squeeze,
    _aten.transpose.int: torch.transpose,
    _aten.sym_size.int: Tensor.size,
}


class EagerCompiler:
    """See the module."""

    name = "eager"
    parallel = False

    def compile(self, piece: fx.GraphModule, context: CompileContext) -> SourcePiece:
        """Write the piece out; nothing depends on sizes."""
        source, constants = write_python(piece.graph, direct(piece.graph, context.device.op_order))
        return SourcePiece(source, constants, self.name)


def write_python(graph: fx.Graph, targets: dict[fx.Node, Callable[..., Any]]) -> tuple[str, dict[str, Any]]:
    """Write a graph as a function `piece` of its inputs that returns a tuple; also return the names in it.

    `targets` replaces the functions of some nodes. A value is let go after its last use.
    """
    writer = _Writer(graph, targets)
    return writer.write(), writer.constants


class _Writer:
    def __init__(self, graph: fx.Graph, targets: dict[fx.Node, Callable[..., Any]]) -> None:
        self._graph = graph
        self._targets = targets
        self._names: dict[fx.Node, str] = {}
        self._functions: dict[Any, str] = {}
        self.constants: dict[str, Any] = {}

    def write(self) -> str:
        nodes = list(self._graph.nodes)
        last = {used: node for node in nodes for used in node.all_input_nodes}
        inputs: list[str] = []
        body: list[str] = []
        result = "()"
        for number, node in enumerate(nodes):
            if node.op == "placeholder":
                self._names[node] = f"i{len(inputs)}"
                inputs.append(self._names[node])
            elif node.op == "output":
                values = node.args[0]
                assert isinstance(values, list | tuple)
                result = self._sequence(values)
            else:
                self._names[node] = name = f"v{number}"
                body.append(f"{name} = {self._call(node)}" if node.users else self._call(node))
                done = [
                    self._names[n] for n in node.all_input_nodes if last[n] is node and n.op != "placeholder"
                ]
                if done:
                    body.append("del " + ", ".join(done))
        body.append(f"return {result}")
        return f"def piece({', '.join(inputs)}):\n    " + "\n    ".join(body) + "\n"

    def _call(self, node: fx.Node) -> str:
        if node.target is operator.getitem:
            return f"{self._value(node.args[0])}[{self._value(node.args[1])}]"
        args = [self._value(a) for a in node.args]
        args += [f"{name}={self._value(v)}" for name, v in node.kwargs.items()]
        return f"{self._function(node)}({', '.join(args)})"

    def _function(self, node: fx.Node) -> str:
        target: Any = node.target
        function = self._targets.get(node) or _BINDINGS.get(target, target)
        if function not in self._functions:
            short = getattr(function, "__name__", "function").strip("_").replace(".", "_")
            name = f"{short}_{len(self._functions)}" if short.isidentifier() else f"f{len(self._functions)}"
            self._functions[function] = name
            self.constants[name] = function
        return self._functions[function]

    def _value(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self._names[value]
        if isinstance(value, tuple):
            return self._sequence(value)
        if isinstance(value, list):
            return "[" + ", ".join(self._value(v) for v in value) + "]"
        if isinstance(value, slice):
            parts = (self._value(v) for v in (value.start, value.stop, value.step))
            return f"slice({', '.join(parts)})"
        plain = isinstance(value, bool | int | str | None)
        if plain or (isinstance(value, float) and math.isfinite(value)):
            return repr(value)
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name

    def _sequence(self, values: Any) -> str:
        inner = ", ".join(self._value(v) for v in values)
        return f"({inner},)" if len(values) == 1 else f"({inner})"
