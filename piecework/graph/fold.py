"""Finds pieces that are the same: they are compiled once and called with other weights."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from piecework.graph.split import op_name
from piecework.graph.symbols import expression


class _Namer:
    """Gives things numbers in the order in which they are first asked for."""

    def __init__(self) -> None:
        self._symbols: dict[sympy.Symbol, sympy.Symbol] = {}

    def size(self, value: int | torch.SymInt) -> str:
        expr = expression(value)
        for symbol in sorted(expr.free_symbols, key=str):
            if symbol not in self._symbols:
                self._symbols[symbol] = sympy.Symbol(f"n{len(self._symbols)}", integer=True, positive=True)
        return str(expr.xreplace(self._symbols))

    def tensor(self, value: Tensor) -> str:
        shape, stride = [[self.size(s) for s in sizes] for sizes in (value.shape, value.stride())]
        return f"{value.dtype}{shape}{stride}@{value.device}"


def structure(graph: fx.Graph) -> str:
    """Write what a piece does as text: ops, literals, wiring, shapes and dtypes of inputs and results.

    Two pieces are the same exactly if their texts are. Names of nodes, inputs and symbols leave no trace.
    """
    namer = _Namer()
    numbers: dict[fx.Node, int] = {}
    lines: list[str] = []

    def literal(value: Any) -> str:
        if isinstance(value, fx.Node):
            return f"%{numbers[value]}"
        if isinstance(value, list | tuple):
            return "(" + ", ".join(literal(v) for v in value) + ")"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k}={literal(v)}" for k, v in sorted(value.items())) + "}"
        if isinstance(value, slice):
            return f"slice{literal((value.start, value.stop, value.step))}"
        return f"{type(value).__name__}:{value!r}"

    for node in graph.nodes:
        number = numbers[node] = len(numbers)
        value = node.meta.get("val")
        if node.op == "placeholder":
            lines.append(f"%{number} = input {_shape(namer, value)}")
        elif node.op == "output":
            lines.append(f"return {literal(node.args[0])}")
        else:
            call = f"{_target(node.target)}{literal(node.args)}{literal(dict(node.kwargs))}"
            lines.append(f"%{number} = {call} -> {_shape(namer, value)}")
    return "\n".join(lines)


def _shape(namer: _Namer, value: Any) -> str:
    if isinstance(value, Tensor):
        return namer.tensor(value)
    if isinstance(value, list | tuple):
        return "(" + ", ".join(_shape(namer, v) for v in value) + ")"
    if isinstance(value, torch.SymInt):
        return namer.size(value)
    return repr(value)


def _target(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return f"{op_name(target)}.{target._overloadname}"
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"


def structural_key(graph: fx.Graph) -> str:
    """Return a hash of `structure`: the same in every process."""
    return hashlib.sha256(structure(graph).encode()).hexdigest()


@dataclass
class Folded:
    """`distinct`: one graph of each kind, in the order of first use; `kind`: for each piece its number."""

    distinct: list[fx.GraphModule]
    keys: list[str]
    kind: list[int]


def fold(pieces: Sequence[fx.GraphModule]) -> Folded:
    """Number the pieces by what they do."""
    numbers: dict[str, int] = {}
    folded = Folded([], [], [])
    for piece in pieces:
        key = structural_key(piece.graph)
        if key not in numbers:
            numbers[key] = len(numbers)
            folded.distinct.append(piece)
            folded.keys.append(key)
        folded.kind.append(numbers[key])
    return folded
