"""Symbolic sizes: how they are made, written into a graph as nodes, and given values.

The pipeline has symbols of its own kind of source only: a symbol is the size of one dimension of an
input. So any size can be recomputed wherever that input is at hand, and no size needs to be passed on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import sympy
import torch
import torch.fx.experimental._config as symbolic_config
from torch import Tensor, fx
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    StrictMinMaxConstraint,
)
from torch.fx.proxy import GraphAppendingTracer, Proxy
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.reference import PythonReferenceAnalysis
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from piecework.graph.binding import MAX_TOKENS

# The value that stands for the token count where torch wants one to decide by (as for tiling).
# It is no size that models have, so that a size that was mistaken for it is seen.
HINT = 37

_MOST_TRIED = 1 << 20
_sym_size = torch.ops.aten.sym_size.int


@contextmanager
def symbolic_sizes() -> Iterator[None]:
    """Make torch believe that a symbolic size may be 0 or 1; whatever traces or compiles runs in here.

    Without it torch takes every symbol for at least 2, whatever range was given, and a graph is wrong
    for one token.
    """
    with symbolic_config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        yield


def new_fake_mode() -> FakeTensorMode:
    """Make a mode for tensors without data, which refuses whatever depends on data."""
    env = ShapeEnv(
        allow_scalar_outputs=False,
        allow_dynamic_output_shape_ops=False,
        specialize_zero_one=False,
        duck_shape=False,
    )
    return FakeTensorMode(shape_env=env)


def new_symbol(mode: FakeTensorMode, name: str, high: int = MAX_TOKENS, low: int = 1) -> torch.SymInt:
    """Make a size between `low` and `high`, the only one of its `name` in this mode."""
    context: Any = StatelessSymbolicContext(
        dynamic_sizes=[DimDynamic.DYNAMIC],
        constraint_sizes=[StrictMinMaxConstraint(vr=ValueRanges(low, high), warn_only=False)],
    )
    example = torch.empty(min(max(HINT, low), high), device="meta")
    fake = mode.from_tensor(example, symbolic_context=context, source=LocalSource(name))
    size: Any = fake.shape[0]
    assert isinstance(size, torch.SymInt)
    return size


def expression(size: Any) -> sympy.Expr:
    """Return a size, an int or a SymInt, as a sympy expression."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def evaluate(expr: sympy.Expr, symbols: dict[sympy.Symbol, Any]) -> Any:
    """Compute an expression; its symbols may stand for ints, SymInts or fx proxies."""
    if isinstance(expr, sympy.Integer):
        return int(expr)
    return sympy_interp(PythonReferenceAnalysis, symbols, expr)


def sizes_of(node: fx.Node) -> list[sympy.Expr]:
    """Return all sizes, strides and the offset of a node's tensors as expressions."""
    found: list[sympy.Expr] = []
    values = node.meta.get("val")
    for value in values if isinstance(values, list | tuple) else [values]:
        if isinstance(value, Tensor):
            found += [expression(s) for s in (*value.shape, *value.stride(), value.storage_offset())]
        elif isinstance(value, torch.SymInt):
            found.append(expression(value))
    return found


def sources(nodes: Sequence[fx.Node]) -> dict[sympy.Symbol, tuple[fx.Node, int]]:
    """Find for each symbol the first of `nodes` that has it as a dimension, and which one."""
    found: dict[sympy.Symbol, tuple[fx.Node, int]] = {}
    for node in nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            for dim, size in enumerate(value.shape):
                expr = expression(size)
                if isinstance(expr, sympy.Symbol):
                    found.setdefault(expr, (node, dim))
    return found


class SizeWriter:
    """Writes sizes as nodes into `graph`; `lookup` gives the input and dimension that a symbol is."""

    def __init__(self, graph: fx.Graph, lookup: Callable[[sympy.Symbol], tuple[fx.Node, int]]) -> None:
        self._graph = graph
        self._tracer = GraphAppendingTracer(graph)
        self._lookup = lookup
        self._written: dict[sympy.Expr, fx.Node] = {}

    def write(self, size: Any) -> fx.Node | int:
        """Return the node that computes `size`, a SymInt, or the number if it is one."""
        expr = expression(size)
        if isinstance(expr, sympy.Integer):
            return int(expr)
        if expr not in self._written:
            symbols = {s: Proxy(self._symbol(s, size), self._tracer) for s in expr.free_symbols}
            self._written[expr] = evaluate(expr, symbols).node
            _annotate(self._written[expr])
        return self._written[expr]

    def _symbol(self, symbol: sympy.Symbol, size: torch.SymInt) -> fx.Node:
        if symbol not in self._written:
            tensor, dim = self._lookup(symbol)
            node = self._graph.call_function(_sym_size, (tensor, dim))
            node.meta["val"] = tensor.meta["val"].shape[dim]
            self._written[symbol] = node
        return self._written[symbol]


def _annotate(node: fx.Node) -> None:
    """Give nodes that compute a size their value, inputs first."""
    if "val" not in node.meta:
        for used in node.all_input_nodes:
            _annotate(used)
        args = fx.map_arg(node.args, lambda n: n.meta["val"])
        node.meta["val"] = node.target(*args)  # type: ignore[operator]


def fresh_fakes(
    values: Sequence[Tensor], mode: FakeTensorMode, tokens: int | None, high: int = MAX_TOKENS
) -> list[FakeTensor]:
    """Make tensors like `values` in `mode`, with symbols of its own and no storage shared.

    With `tokens` every symbol is that number, so that the sizes are static.
    """
    symbols: dict[sympy.Symbol, Any] = {}

    def size(value: int | torch.SymInt) -> Any:
        expr = expression(value)
        for symbol in sorted(expr.free_symbols, key=str):
            if symbol not in symbols:
                name = f"tokens{len(symbols)}"
                symbols[symbol] = new_symbol(mode, name, high) if tokens is None else tokens
        return evaluate(expr, symbols)

    made: list[FakeTensor] = []
    for value in values:
        shape, stride = [size(s) for s in value.shape], [size(s) for s in value.stride()]
        with mode:
            fake = torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
        assert isinstance(fake, FakeTensor)
        made.append(fake)
    return made


def assumptions(mode: FakeTensorMode, low: int = 1) -> list[str]:
    """List what was assumed of sizes in `mode` that doesn't hold for every size from `low` on."""
    env = mode.shape_env
    assert env is not None
    ranges: dict[sympy.Symbol, ValueRanges[Any]] = {}
    for symbol, known in env.var_to_range.items():
        ranges[symbol] = ValueRanges(max(low, 1), known.upper) if known.upper > low else known
    failed: list[str] = []
    for guard in env.guards:
        expr = getattr(guard, "expr", guard)
        expr = env.simplify(expr) if not isinstance(expr, bool) else sympy.sympify(expr)
        if expr == sympy.true or _holds(expr, ranges):
            continue
        failed.append(str(expr))
    for symbol, replaced in env.replacements.items():
        if symbol in env.var_to_range:
            failed.append(f"{symbol} = {replaced}")
    return failed


def _holds(expr: sympy.Basic, ranges: dict[sympy.Symbol, ValueRanges[Any]]) -> bool:
    """Say whether a condition is true for all sizes: by reasoning, else by trying every one."""
    if bound_sympy(expr, ranges).lower == sympy.true:
        return True
    symbols = list(expr.free_symbols)
    if len(symbols) != 1 or symbols[0] not in ranges:
        return False
    low, high = ranges[symbols[0]].lower, ranges[symbols[0]].upper
    if not (low.is_Integer and high.is_Integer and high - low <= _MOST_TRIED):
        return False
    text = PythonPrinter().doprint(expr)
    check = eval(f"lambda {symbols[0]}: {text}", {"math": math})
    return all(check(size) for size in range(int(low), int(high) + 1))
