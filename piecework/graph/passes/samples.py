"""Random values for a graph's nodes, made to bring mistakes to light.

Rows of activations have magnitudes from denormal to large, so that an eps or a scale that is wrong is
seen in some row. Token counts are odd, and one.
"""

from __future__ import annotations

import zlib
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.utils._sympy.symbol import SymT, symbol_is_type

from piecework.graph.passes.aliases import inputs_of
from piecework.graph.passes.arguments import Bound, bind
from piecework.graph.symbols import evaluate, expression
from piecework.ops.cpu.coded_linear import code

TOKENS = (1, 7, 33)
"""The sizes that symbolic dimensions get, one after the other."""

# Magnitudes of rows. About the root of the usual eps (1e-6 to 1e-5) an eps is as large as the mean square.
_ROWS = (1.0, 1e-40, 3e-3, 1e-12, 30.0, 1e-3, 1e15, 0.0)
_ROWS_HALF = (1.0, 1e-7, 3e-3, 1e-5, 30.0, 1e-2, 1e3, 0.0)


def assign(graph: Graph, tokens: int) -> dict[sympy.Symbol, int]:
    """Give every size symbol of the graph a value near `tokens`, inside its range.

    Symbols that had one value when the graph was traced get one value: the model may need them equal.
    """
    groups: dict[Any, dict[sympy.Symbol, Any]] = {}
    for node in graph.nodes:
        if node.op != "placeholder":
            continue
        val = node.meta["val"]
        for size in val.shape if isinstance(val, Tensor) else [val]:
            if not isinstance(size, torch.SymInt):
                continue
            env = size.node.shape_env
            for symbol in sorted(size.node.expr.free_symbols, key=str):
                if symbol_is_type(symbol, (SymT.SIZE, SymT.UNBACKED_INT)):
                    hint = _traced_values(env).get(symbol, symbol)
                    groups.setdefault(hint, {})[symbol] = env.var_to_range.get(symbol)
    values: dict[sympy.Symbol, int] = {}
    for index, group in enumerate(groups.values()):
        value = tokens + 2 * index
        for known in group.values():
            if known is not None:
                value = int(max(known.lower, min(value, known.upper)))
        values.update(dict.fromkeys(group, value))
    return values


def _traced_values(env: Any) -> Any:
    # torch 2.11 has it under the older name.
    return env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val


class Samples:
    """Makes values for nodes by their fake values; a node gets the same one whenever it is asked for.

    What an input is for is read off `graph`, the one before the rewrite: the rewritten one may be wrong.
    """

    def __init__(self, symbols: dict[sympy.Symbol, int], seed: int, graph: Graph) -> None:
        self._symbols = symbols
        self._seed = seed
        self._inputs = {node.name: node for node in graph.find_nodes(op="placeholder")}
        self._constants = quantisers(graph)

    def number(self, val: torch.SymInt | int) -> int:
        """The value of a symbolic size."""
        return int(evaluate(expression(val), self._symbols))

    def shape(self, val: Tensor) -> list[int]:
        """A fake tensor's sizes as numbers."""
        return [self.number(size) for size in val.shape]

    def make(self, node: Node, salt: int = 0) -> Any:
        """A random value for what `node` gives: a tensor, a number, or a tuple of tensors."""
        node = self._inputs.get(node.name, node) if node.op == "placeholder" else node
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + salt) % 2**63)
        if node in self._constants:
            return self._constant(node, node.meta["val"])
        return self._make(node, node.meta["val"], generator)

    def _constant(self, node: Node, val: Tensor) -> Tensor:
        """A scale that brings rows of magnitude 1 well into int8, its reciprocal, or an offset of 5 to 15."""
        role, scale = self._constants[node]
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + zlib.crc32(scale.name.encode()))
        made = torch.rand(self.shape(val), generator=generator)
        made = (5 + 10 * made).round() if role == "offset" else 0.01 + 0.02 * made
        return (1 / made if role == "reciprocal" else made).to(val.dtype).to(val.device)

    def _make(self, node: Node, val: Any, generator: torch.Generator) -> Any:
        if isinstance(val, tuple | list):
            return tuple(self._make(node, v, generator) for v in val)
        if isinstance(val, torch.SymInt):
            return self.number(val)
        if not isinstance(val, Tensor):
            return val
        shape = self.shape(val)
        if val.dtype is torch.bool:
            made = torch.rand(shape, generator=generator) < 0.5
        elif val.dtype.is_floating_point:
            made = self._floats(node, val, shape, generator)
        elif (coded := coded_shape(node)) is not None:
            made = code_sample(torch.randn(coded, generator=generator) * coded[1] ** -0.5)
        else:
            made = torch.randint(0, index_bound(node), shape, generator=generator).to(val.dtype)
        return self._strided(made, val).to(val.device)

    def _floats(self, node: Node, val: Tensor, shape: list[int], generator: torch.Generator) -> Tensor:
        made = torch.randn(shape, generator=generator)
        wide = min(torch.finfo(val.dtype).max, torch.finfo(torch.float32).max)
        if is_weight(node, val):
            # A product with it should keep its magnitude.
            return (made * max(shape[-1], 1) ** -0.5 if len(shape) > 1 else made).to(val.dtype)
        rows = _ROWS_HALF if wide < 1e30 else _ROWS
        count = max(1, made[..., :1].numel())
        order = torch.arange(count) + int(torch.randint(0, len(rows), (1,), generator=generator))
        scale = torch.tensor(rows)[order % len(rows)]
        if len(shape) > 1:
            made = made * scale.view(*shape[:-1], 1)
        return made.to(val.dtype)

    def _strided(self, made: Tensor, val: Tensor) -> Tensor:
        """Lay a value out as the fake is: a view that works there must work here."""
        strides = [self.number(s) for s in val.stride()]
        if list(made.stride()) == strides or made.numel() == 0:
            return made
        if any(s == 0 for s in strides):
            return made
        need = 1 + sum((n - 1) * s for n, s in zip(made.shape, strides, strict=True))
        out = torch.zeros(need, dtype=made.dtype).as_strided(made.shape, strides)
        return out.copy_(made)


_ROLES = ("scale", "reciprocal", "offset")


def quantisers(graph: Graph) -> dict[Node, tuple[str, Node]]:
    """The inputs that are constants of a static quantisation: what each is, and the scale it belongs to."""
    found: dict[Node, tuple[str, Node]] = {}
    for node in graph.nodes:
        names = [a.name for a in node.target._schema.arguments] if isinstance(node.target, OpOverload) else []
        if not set(_ROLES).issubset(names):
            continue
        bound = bind(node.target, node.args, dict(node.kwargs))
        for role in _ROLES:
            if isinstance(bound[role], Node) and bound[role].op == "placeholder":
                found.setdefault(bound[role], (role, bound["scale"]))
    return found


def coded_shape(node: Node) -> tuple[int, int] | None:
    """Rows and channels of the matrix that an input is the coded form of, as the ops that take it say."""
    for user in node.users:
        if not isinstance(user.target, OpOverload) or "_coded" not in user.target.name():
            continue
        bound = bind(user.target, user.args, dict(user.kwargs))
        if bound["coded"] is node:
            return (bound["vocab_size"], bound["size"]) if "ids" in bound else _linear_shape(bound)
    return None


def _linear_shape(bound: Bound) -> tuple[int, int]:
    return bound["outputs"], bound["x"].meta["val"].shape[-1]


def code_sample(weight: Tensor) -> Tensor:
    """Return the coded form of a matrix, which is there where a graph has any."""
    made = code(weight.bfloat16())
    assert made is not None, "numbers near one another have few exponents"
    return made


def is_weight(node: Node, val: Tensor) -> bool:
    """Whether a value looks like a parameter: an input of the graph with no symbolic size."""
    return node.op in ("placeholder", "get_attr") and all(isinstance(size, int) for size in val.shape)


def index_bound(node: Node) -> int:
    """Below what the integers of `node` must stay, where they index rows of a table; 2 where unknown."""
    sizes: list[int] = []
    for user in node.users:
        tables = [n.meta.get("val") for n in inputs_of(user) if n is not node]
        rows = [t.shape[0] for t in tables if isinstance(t, Tensor) and t.ndim == 2]
        sizes += [rows_ for rows_ in rows if isinstance(rows_, int)]
    return max(1, min(sizes, default=2))
