"""A traced graph as lines of text, with shapes in which the number of tokens is called T."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from piecework.graph.passes.arguments import op_name
from piecework.graph.symbols import expression

_LETTERS = "TUVWXYZ"
_LAYER = re.compile(r"\.\d+\.")


class Shapes:
    """Writes shapes as `bfloat16[T, 576]`; symbols get their letters in the order in which they come."""

    def __init__(self) -> None:
        self._letters: dict[sympy.Symbol, sympy.Symbol] = {}

    def size(self, value: int | torch.SymInt) -> str:
        """A size: a number, or a formula in T."""
        expr = expression(value)
        for symbol in sorted(expr.free_symbols, key=str):
            if symbol not in self._letters:
                count = len(self._letters)
                letter = _LETTERS[count] if count < len(_LETTERS) else f"T{count}"
                self._letters[symbol] = sympy.Symbol(letter)
        return str(expr.xreplace(self._letters))

    def value(self, value: Any) -> str:
        """What a node gives: a tensor, several, a size, or nothing."""
        if isinstance(value, Tensor):
            sizes = ", ".join(self.size(s) for s in value.shape)
            return f"{str(value.dtype).removeprefix('torch.')}[{sizes}]"
        if isinstance(value, list | tuple):
            return "(" + ", ".join(self.value(v) for v in value) + ")"
        if isinstance(value, torch.SymInt):
            return self.size(value)
        return "" if value is None else str(value)


def graph_lines(graph: fx.Graph, names: Mapping[str, str] = {}) -> list[str]:
    """Write a graph, a line a node; `names` says what placeholders stand for, by their nodes' names."""
    shapes = Shapes()
    lines: list[str] = []
    for node in graph.nodes:
        shape = shapes.value(node.meta.get("val"))
        if node.op == "placeholder":
            stands_for = names.get(node.name, node.name)
            lines.append(f"{node.name}: {shape}" + (f"  = {stands_for}" if stands_for != node.name else ""))
        elif node.op == "output":
            lines.append(f"return {_argument(node.args[0])}")
        else:
            arguments = [_argument(a) for a in node.args]
            arguments += [f"{name}={_argument(value)}" for name, value in node.kwargs.items()]
            call = f"{op_name(node.target)}({', '.join(arguments)})"
            lines.append(f"{node.name} = {call}" + (f"  -> {shape}" if shape else ""))
    return lines


def tensors(nodes: Iterable[fx.Node], names: Mapping[str, str], *, everywhere: bool = False) -> list[str]:
    """Describe inputs or results, one a line; `everywhere` leaves layers' numbers out of weights' names."""
    shapes = Shapes()
    found = []
    for node in nodes:
        name = names.get(node.name, node.name)
        if everywhere:
            name = _LAYER.sub(".*.", name)
        found.append(f"{name}: {shapes.value(node.meta.get('val'))}")
    return found


def _argument(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_argument(v) for v in value) + "]"
    if isinstance(value, torch.dtype | torch.device | torch.memory_format):
        return str(value).removeprefix("torch.")
    return repr(value)
