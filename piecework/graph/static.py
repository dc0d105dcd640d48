"""A program's flat graph at one size, with attention inside as plain operations, for static devices.

Each `attention` becomes products and a softmax over the past and the new tokens. The past is an input, with
room for a fixed number of tokens, and so is a mask, which says what of it is there; the new keys and values
are results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from piecework.graph.program import ATTENTION
from piecework.graph.propagate import Propagator
from piecework.graph.split import op_name
from piecework.graph.symbols import assumptions, expression, new_fake_mode, new_symbol, symbolic_sizes
from piecework.ops.attention import attention

_aten = torch.ops.aten
_END = 2**63 - 1
LEAST_OPEN = 2
"""The least capacity of an open one: torch lays out a size of 1 in another way."""
_ALLOCATIONS = ("aten::empty_like", "aten::empty", "aten::new_empty", "aten::empty_strided")


class StaticGraphError(ValueError):
    """A graph whose attention can't be written out."""


@dataclass(frozen=True)
class StaticGraph:
    """The rewritten graph; all its sizes are numbers, but for a capacity that was left open.

    `added` names its new inputs, which follow the others, in order: `mask.<window>` [T, S + T] float32, which
    is added to scores, and `keys.<layer>` [1, H, S, E] and `values.<layer>` of the past. Its results are
    those of the program, then the new keys of all layers, then the new values.
    """

    graph_module: fx.GraphModule
    added: tuple[str, ...]


def with_static_attention(
    graph: fx.Graph, tokens: int, capacity: int | None, *, transpose_values: bool = False
) -> StaticGraph:
    """Copy `graph` for `tokens` rows of one sequence and a past with room for `capacity` tokens.

    Args:
        graph: flat, its nodes with values in `meta["val"]`.
        capacity: None leaves it open: the graph runs for any from LEAST_OPEN on.
        transpose_values: past and new values are [1, H, E, S] in place of [1, H, S, E].

    Raises StaticGraphError.
    """
    return _Rewrite(graph, tokens, capacity, transpose_values).run()


class _Rewrite:
    def __init__(self, graph: fx.Graph, tokens: int, capacity: int | None, transpose_values: bool) -> None:
        self._nodes = list(graph.nodes)
        self._tokens = tokens
        self._transposed = transpose_values
        self._graph = fx.Graph()
        self._mode = new_fake_mode()
        self._capacity = new_symbol(self._mode, "capacity", low=LEAST_OPEN) if capacity is None else capacity
        self._propagate = Propagator(self._mode)
        self._seen: dict[fx.Node, Any] = {}
        self._added: dict[str, fx.Node] = {}
        self._new: dict[int, tuple[fx.Node, fx.Node]] = {}

    def run(self) -> StaticGraph:
        with torch.inference_mode(False), torch.no_grad(), symbolic_sizes():
            made = self._run()
        if failed := assumptions(self._mode, LEAST_OPEN):
            raise StaticGraphError(
                f"it doesn't hold for every capacity from {LEAST_OPEN} on that {failed[0]}"
            )
        return made

    def _run(self) -> StaticGraph:
        calls = {node: _arguments(node) for node in self._nodes if op_name(node.target) == ATTENTION}
        for node in self._nodes:
            if node.op == "placeholder":
                self._seen[node] = self._input(str(node.target), node.meta["val"])
        for call in calls.values():
            self._add_inputs(call)
        for node in self._nodes:
            if node in calls:
                self._fill(node, calls[node])
            elif node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self._seen.__getitem__)
                self._seen[node] = self._call(node.target, *args, **kwargs)
            elif node.op == "output":
                results = [self._seen[n] for n in node.args[0]]
                layers = [self._new[layer] for layer in sorted(self._new)]
                results += [keys for keys, _ in layers] + [values for _, values in layers]
                self._graph.output(tuple(results))
        self._graph.eliminate_dead_code(_must_stay)
        self._graph.lint()
        return StaticGraph(fx.GraphModule(nn.Module(), self._graph), tuple(self._added))

    def _input(self, name: str, like: Tensor) -> fx.Node:
        shape = tuple(self._tokens if not expression(s).is_Integer else int(s) for s in like.shape)
        return self._placeholder(name, shape, like.dtype, like.device)

    def _placeholder(
        self, name: str, shape: tuple[int | torch.SymInt, ...], dtype: torch.dtype, device: torch.device
    ) -> fx.Node:
        node = self._graph.placeholder(name.replace(".", "_"))
        with self._mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype, device=device)
        return node

    def _add_inputs(self, call: dict[str, Any]) -> None:
        k = call["k"].meta["val"]
        heads, size, room = int(k.shape[1]), int(k.shape[2]), self._capacity
        values = (1, heads, size, room) if self._transposed else (1, heads, room, size)
        mask = (self._tokens, room + self._tokens)
        for name, shape, dtype in (
            (f"mask.{call['window']}", mask, torch.float32),
            (f"keys.{call['layer']}", (1, heads, room, size), k.dtype),
            (f"values.{call['layer']}", values, k.dtype),
        ):
            if name not in self._added:
                self._added[name] = self._placeholder(name, shape, dtype, k.device)

    def _call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Add a call and work out its result's shape; a size is a number from here on."""
        given = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        val = self._propagate(target, tuple(given[0]), dict(given[1]))
        if isinstance(val, int):
            return val
        node = self._graph.call_function(target, args, kwargs)
        node.meta["val"] = val
        return node

    def _fill(self, node: fx.Node, call: dict[str, Any]) -> None:
        """Put plain operations in place of one attention; `out` is their result from here on."""
        out = call["out"]
        before = [user for user in out.users if self._nodes.index(user) < self._nodes.index(node)]
        if op_name(out.target) not in _ALLOCATIONS or before:
            raise StaticGraphError(f"the memory that {node} writes is used before it")
        q, k, v = (self._seen[call[name]] for name in ("q", "k", "v"))
        past = [self._added[f"{kind}.{call['layer']}"] for kind in ("keys", "values")]
        mask = self._added[f"mask.{call['window']}"]
        keys = self._call(_aten.unsqueeze.default, self._call(_aten.permute.default, k, [1, 0, 2]), 0)
        order = [1, 2, 0] if self._transposed else [1, 0, 2]
        values = self._call(_aten.unsqueeze.default, self._call(_aten.permute.default, v, order), 0)
        self._new[call["layer"]] = keys, values
        self._seen[out] = self._attend(q, [past[0], keys], [past[1], values], mask, call["scale"])

    def _attend(self, q: Any, keys: list[Any], values: list[Any], mask: Any, scale: float) -> Any:
        """Softmax(scale * q k^T + mask) v in float32, as the op's reference. q [T, Hq, E] -> [T, Hq, E].

        Query heads that share a key head are rows of one product.
        """
        val = q.meta["val"]
        tokens, dtype = self._tokens, val.dtype
        heads, size = int(val.shape[1]), int(val.shape[2])
        kv_heads = int(keys[0].meta["val"].shape[1])
        group = heads // kv_heads
        reshape, matmul = _aten.reshape.default, _aten.matmul.default

        def turned(x: Any) -> Any:
            return self._call(_aten.transpose.int, x, 2, 3)

        rows = self._call(reshape, self._float(q), [tokens, kv_heads, group, size])
        rows = self._call(_aten.permute.default, rows, [1, 2, 0, 3])
        rows = self._call(reshape, rows, [1, kv_heads, group * tokens, size])
        scores = [self._call(matmul, rows, turned(self._float(k))) for k in keys]
        joined = self._call(_aten.mul.Scalar, self._call(_aten.cat.default, scores, 3), scale)
        joined = self._call(reshape, joined, [kv_heads, group, tokens, -1])
        shares = self._call(_aten.softmax.int, self._call(_aten.add.Tensor, joined, mask), 3)
        shares = self._call(reshape, shares, [1, kv_heads, group * tokens, -1])
        outs = []
        # The new tokens are counted from the end, since the capacity may be open.
        for v, (start, stop) in zip(values, ((0, -tokens), (-tokens, _END)), strict=True):
            v = turned(self._float(v)) if self._transposed else self._float(v)
            outs.append(self._call(matmul, self._call(_aten.slice.Tensor, shares, 3, start, stop), v))
        out = self._call(reshape, self._call(_aten.add.Tensor, *outs), [kv_heads, group, tokens, size])
        out = self._call(_aten.permute.default, out, [2, 0, 1, 3])
        # As `out` was: whoever reads it may take views that only contiguous memory has.
        out = self._call(_aten.clone.default, out, memory_format=torch.contiguous_format)
        out = self._call(reshape, out, [tokens, heads, size])
        return self._to(out, dtype)

    def _float(self, x: Any) -> Any:
        return self._to(x, torch.float32)

    def _to(self, x: Any, dtype: torch.dtype) -> Any:
        return x if x.meta["val"].dtype is dtype else self._call(_aten._to_copy.default, x, dtype=dtype)


def _arguments(node: fx.Node) -> dict[str, Any]:
    names = [argument.name for argument in attention.overload._schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _must_stay(node: fx.Node) -> bool:
    """Whether a node must stay although nothing reads it."""
    target = node.target
    return node.op in ("placeholder", "output") or (
        isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
    )
