"""Finds rotary embedding as transformers writes it, and makes `piecework::rotary` of it.

There every layer computes x * cos + cat(-x2, x1) * sin, with cos and sin that hold each angle twice. The
named op wants a table with each angle once and the row to use, so table and rows are made once, beside
cos and sin.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

import piecework.ops  # noqa: F401  registers the named ops
from piecework.graph.passes.base import GraphPass, Match, Outcome, PassContext
from piecework.graph.passes.bounds import tolerance
from piecework.graph.passes.canonicalise import canonicalise
from piecework.graph.passes.editor import Editor
from piecework.graph.passes.fakes import value
from piecework.graph.passes.match import Matcher
from piecework.graph.passes.pattern import read_pattern

_aten = torch.ops.aten
_NAME = "raise_rotary"


def _turned(x: Tensor, cos: Tensor, sin: Tensor, half: int) -> Any:
    first, second = x.split([half, half], -1)
    return x * cos + torch.cat([-second, first], -1) * sin


_PATTERN = read_pattern(_NAME, _turned)


@dataclass(frozen=True)
class _Angles:
    """Where cosine or sine [B, T, D] comes from, and which dimension of x the heads are."""

    base: Node
    heads: int


def _angles(node: Node, function: Any) -> _Angles | str:
    """Follow [B, 1, T, D] or [B, T, 1, D] back to `function`(cat(f, f)); a text says why it isn't that."""
    if node.target is not _aten.unsqueeze.default or value(node).ndim != 4:
        return "cos and sin are not [batch, tokens, size] with a dimension for the heads"
    base, heads = node.args[0], node.args[1]
    assert isinstance(base, Node) and isinstance(heads, int)
    if heads not in (1, 2):
        return "the heads are neither before nor behind the tokens"
    found: Any = base
    while isinstance(found, Node) and found.target in (_aten.to.dtype, _aten.mul.Tensor):
        if found.target is _aten.mul.Tensor and isinstance(found.args[1], Node):
            return "cos and sin are scaled by a tensor"
        found = found.args[0]
    twice = found.args[0] if isinstance(found, Node) and found.target is function else None
    parts = twice.args[0] if isinstance(twice, Node) and twice.target is _aten.cat.default else None
    if not isinstance(parts, list | tuple) or len(parts) != 2 or parts[0] is not parts[1]:
        return "it can't be shown that cos and sin hold each angle twice"
    assert isinstance(twice, Node)
    if twice.args[1:] not in ((2,), (-1,)):
        return "cos and sin hold each angle twice along another dimension"
    return _Angles(base, heads)


class _Raiser:
    """One graph's rotary embeddings."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._editor = Editor(graph)
        self._outcome = Outcome()
        self._tables: dict[tuple[Node, Node], tuple[Node, Node]] = {}

    def run(self) -> Outcome:
        matcher = Matcher(_PATTERN, self._graph)
        order = {node: index for index, node in enumerate(self._graph.nodes)}
        groups: dict[tuple[Node, Node], list[Match]] = defaultdict(list)
        for anchor in matcher.anchors():
            match = next(iter(matcher.at(anchor)), None)
            if match is not None:
                groups[match["cos"], match["sin"]].append(match)
        for (cos, sin), matches in groups.items():
            matches.sort(key=lambda m: order[m.outputs[0]])
            found = [_angles(cos, _aten.cos.default), _angles(sin, _aten.sin.default)]
            reasons = [f for f in found if isinstance(f, str)]
            if len(matches) % 2:
                reasons.append("a query has no key beside it")
            if reasons:
                self._outcome.refused[reasons[0]] += len(matches)
                continue
            for query, key in zip(matches[::2], matches[1::2], strict=True):
                self._raise(query, key, found[0], found[1], order)  # type: ignore[arg-type]
        canonicalise(self._graph)
        return self._outcome

    def _raise(self, query: Match, key: Match, cos: _Angles, sin: _Angles, order: dict[Node, int]) -> None:
        """Replace the last computations of a query and its key; what led to them is dead then."""
        first, last = sorted((query.outputs[0], key.outputs[0]), key=lambda n: order[n])
        early = min((order[user] for user in first.users), default=order[last])
        if cos.heads != sin.heads or early < order[last]:
            self._outcome.refused["the query is used before the key is there"] += 2
            return
        table, rows = self._table(cos.base, sin.base, query["x"], order)
        call = self._editor.call
        flat = [self._flat(last, match["x"], cos.heads) for match in (query, key)]
        both = call(last, torch.ops.piecework.rotary.default, rows, *flat, table)
        for index, match in enumerate((query, key)):
            part = self._editor.call_any(last, operator.getitem, both, index)
            old = match.outputs[0]
            old.replace_all_uses_with(self._shaped(last, part, match["x"], cos.heads))
        self._outcome.matches += 1

    def _flat(self, place: Node, x: Node, heads: int) -> Node:
        """[B, Hq, T, D] or [B, T, Hq, D] -> [B * T, Hq, D]."""
        call = self._editor.call
        if heads == 1:
            x = call(place, _aten.transpose.int, x, 1, 2)
        return call(place, _aten.reshape.default, x, [-1, *value(x).shape[2:]])

    def _shaped(self, place: Node, flat: Node, like: Node, heads: int) -> Node:
        """[B * T, Hq, D] -> the shape of `like`."""
        call = self._editor.call
        batch = self._size(place, like, 0)
        shaped = call(place, _aten.view.default, flat, [batch, -1, *value(flat).shape[1:]])
        return call(place, _aten.transpose.int, shaped, 1, 2) if heads == 1 else shaped

    def _table(self, cos: Node, sin: Node, x: Node, order: dict[Node, int]) -> tuple[Node, Node]:
        """cos and sin [1 or B, T, D] -> a table [B * T, D] of D/2 cosines and D/2 sines, and its rows."""
        if (cos, sin) not in self._tables:
            call = self._editor.call
            after = max((cos, sin), key=lambda n: order[n])
            place = after.next
            size = value(cos).shape[-1]
            halves = [call(place, _aten.slice.Tensor, node, 2, 0, size // 2) for node in (cos, sin)]
            table = call(place, _aten.cat.default, halves, 2)
            table = call(place, _aten.to.dtype, table, torch.float32)
            tokens = self._size(place, cos, 1)
            count: Any = tokens
            if str(value(x).shape[0]) != "1":
                batch = self._batch(place, cos, x)
                if str(value(cos).shape[0]) == "1":
                    table = call(place, _aten.expand.default, table, [batch, -1, -1])
                count = self._times(place, batch, tokens)
            table = call(place, _aten.reshape.default, table, [-1, size])
            device = value(cos).device
            rows = call(place, _aten.arange.default, count, dtype=torch.int64, device=device)
            self._tables[cos, sin] = (table, rows)
        return self._tables[cos, sin]

    def _batch(self, place: Node, cos: Node, x: Node) -> Any:
        size = value(x).shape[0]
        if isinstance(size, int):
            return size
        # x comes after this place; an input of the graph has the same size.
        for node in self._graph.nodes:
            val = node.meta.get("val")
            if node.op == "placeholder" and isinstance(val, Tensor):
                for dim, found in enumerate(val.shape):
                    if str(found) == str(size):
                        return self._editor.call(place, _aten.sym_size.int, node, dim)
        raise ValueError(f"no input has the batch size {size}")

    def _size(self, place: Node, node: Node, dim: int) -> Any:
        size = value(node).shape[dim]
        return size if isinstance(size, int) else self._editor.call(place, _aten.sym_size.int, node, dim)

    def _times(self, place: Node, a: Any, b: Any) -> Any:
        if isinstance(a, int) and isinstance(b, int):
            return a * b
        return self._editor.call_any(place, operator.mul, a, b)


def raise_rotary() -> GraphPass:
    """x * cos + rotate_half(x) * sin of queries and keys -> `piecework::rotary`.

    The named op computes in float32 where the model may compute in 16 bits, hence the bound.
    """

    def rewrite(graph: Graph, context: PassContext) -> Outcome:
        return _Raiser(graph).run()

    return GraphPass(name=_NAME, rewrite=rewrite, bound=tolerance(), in_context=True)
