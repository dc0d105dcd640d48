"""Reads a pattern function into a small graph of ops and variables.

The function is called with symbols in place of tensors, so it can use named ops, `torch.ops.aten`, the
usual operators, methods and functions of tensors, and unpack results; it cannot look at shapes.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import Graph, Node
from torch.fx.proxy import GraphAppendingTracer, Proxy

from piecework.graph.passes.errors import PatternError


@dataclass(frozen=True, eq=False)
class Var:
    """A placeholder. `kind` is what its annotation asks for: `tensor`, `literal`, or `any`."""

    name: str
    kind: str


@dataclass(frozen=True, eq=False)
class PatternOp:
    """One call in a pattern. A packet stands for every overload; getitem has the index second."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Pattern:
    """A pattern as a graph: `ops` in the order of the function, `outputs` those that it returns."""

    variables: tuple[Var, ...]
    ops: tuple[PatternOp, ...]
    outputs: tuple[PatternOp, ...]


_OPERATORS: dict[Any, str] = {
    operator.add: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.truediv: "div",
    operator.neg: "neg",
    operator.pow: "pow",
    operator.matmul: "matmul",
}
# The canonical form of what these are in a graph; `canonicalise` brings the graph to the same.
_CANONICAL = {"split": "split_with_sizes", "reshape": "view", "square": "pow"}
_CASTS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}


def read_pattern(name: str, function: Callable[..., Any]) -> Pattern:
    """Read the pattern of the pass `name`; PatternError says what in it can't be matched.

    A parameter with a default is no placeholder: it has that value.
    """
    parameters = inspect.signature(function).parameters
    graph = Graph()
    tracer = GraphAppendingTracer(graph)
    known: dict[Node, Any] = {}
    proxies: dict[str, Proxy] = {}
    for parameter in parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise PatternError(name, f"pattern: parameter {parameter} must be a plain one")
        if parameter.default is not parameter.empty:
            continue
        node = graph.placeholder(parameter.name)
        known[node] = Var(parameter.name, _kind(parameter.annotation))
        proxies[parameter.name] = Proxy(node, tracer)
    variables = tuple(known.values())
    try:
        result = function(**proxies)
    except Exception as error:
        raise PatternError(name, f"pattern can't be read: {type(error).__name__}: {error}") from error
    for node in graph.nodes:
        if node.op != "placeholder":
            known[node] = _read_op(name, node, known)
    returned = result if isinstance(result, tuple | list) else (result,)
    if not returned or not all(isinstance(r, Proxy) for r in returned):
        raise PatternError(name, "pattern must return a tensor, or a tuple of tensors, that it computes")
    outputs = tuple(known[r.node] for r in returned)
    if any(isinstance(output, Var) for output in outputs):
        raise PatternError(name, "pattern returns a parameter; only what it computes can be replaced")
    ops = _used(outputs)
    _check(name, variables, ops)
    ordered = tuple(op for node, op in known.items() if node.op != "placeholder" and op in ops)
    return Pattern(variables, ordered, outputs)


def _kind(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    if text.rsplit(".", 1)[-1] == "Tensor":
        return "tensor"
    return "literal" if text in ("int", "float", "bool") else "any"


def _read_op(name: str, node: Node, known: dict[Node, Any]) -> PatternOp:
    args = torch.fx.map_arg(node.args, lambda n: known[n])
    kwargs = dict(torch.fx.map_arg(dict(node.kwargs), lambda n: known[n]))
    target = node.target
    if target is operator.getitem:
        if not isinstance(args[1], int):
            raise PatternError(name, f"pattern: write a slice as split or torch.ops.aten.slice, not {node}")
        return PatternOp(target, tuple(args))
    if isinstance(target, OpOverload | OpOverloadPacket):
        return PatternOp(target, tuple(args), kwargs)
    word = target if isinstance(target, str) else getattr(target, "__name__", "")
    word = _OPERATORS.get(target, word)
    if kwargs.get("inplace") is False:
        kwargs.pop("inplace")
    if word in _CASTS:
        word, args = "to", (args[0], _CASTS[word])
    if word == "square":
        args = (args[0], 2)
    if word in ("view", "reshape", "permute") and len(args) > 1 and not isinstance(args[1], list | tuple):
        args = (args[0], list(args[1:]))
    packet = getattr(torch.ops.aten, _CANONICAL.get(word, word), None)
    if packet is None:
        raise PatternError(name, f"pattern: {target} is no op; use torch.ops.piecework or torch.ops.aten")
    return PatternOp(packet, tuple(args), kwargs)


def _used(outputs: tuple[PatternOp, ...]) -> set[PatternOp]:
    used: set[PatternOp] = set()
    stack = list(outputs)
    while stack:
        op = stack.pop()
        if op not in used:
            used.add(op)
            stack.extend(leaf for leaf in leaves(op) if isinstance(leaf, PatternOp))
    return used


def leaves(op: PatternOp) -> list[Any]:
    """The variables and ops in a pattern op's arguments."""
    found: list[Any] = []

    def walk(value: Any) -> None:
        if isinstance(value, list | tuple):
            for v in value:
                walk(v)
        elif isinstance(value, Var | PatternOp):
            found.append(value)

    walk((op.args, tuple(op.kwargs.values())))
    return found


def _check(name: str, variables: tuple[Var, ...], ops: set[PatternOp]) -> None:
    for op in ops:
        overloads = [op.target] if isinstance(op.target, OpOverload) else []
        if isinstance(op.target, OpOverloadPacket):
            overloads = [getattr(op.target, o) for o in op.target.overloads() if not o.endswith("out")]
        if overloads and all(o._schema.is_mutable for o in overloads):
            raise PatternError(name, f"pattern: {op.target} writes into its arguments; write a GraphPass")
    met = {leaf for op in ops for leaf in leaves(op) if isinstance(leaf, Var)}
    unused = [v.name for v in variables if v not in met]
    if unused:
        raise PatternError(name, f"pattern doesn't use {', '.join(unused)}")
    # From one op to its arguments and to other users of them, every op must be within reach.
    reached: set[Any] = set()
    grown: set[Any] = {next(iter(ops))}
    while grown:
        reached |= grown
        touched = {leaf for op in reached if isinstance(op, PatternOp) for leaf in leaves(op)}
        grown = (touched | {op for op in ops if reached & set(leaves(op))}) - reached
    if not ops <= reached:
        raise PatternError(name, "pattern has parts that share nothing; make them two passes")
