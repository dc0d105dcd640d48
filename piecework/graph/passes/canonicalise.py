"""Brings every spelling of views, splits, casts and dimensions to one form, so that patterns can match.

Sizes come from the fake values: numbers, and -1 for the one symbolic dimension. Dimensions count from
the front, arguments are positional and without defaults, whatever changes nothing is gone, slices that
cut up one tensor are one split, and a split of a view's heads is a split of its rows.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from piecework.graph.passes.aliases import Aliases
from piecework.graph.passes.arguments import Bound, bind, op_name, positive_dims, spell
from piecework.graph.passes.base import GraphPass, PassContext
from piecework.graph.passes.editor import Editor
from piecework.graph.passes.fakes import settle, signature, value
from piecework.graph.passes.views import canonical_sizes, split_below_view, viewable

_aten = torch.ops.aten
_END = 2**63 - 1

Rule = Callable[[Editor, Node, Bound], Node | None]
"""Gives the node that stands for this one from now on; None leaves it."""


def _unchanged(editor: Editor, node: Node, bound: Bound) -> Node | None:
    """A call that gives its input back: contiguous, expand, ... where there is nothing to do."""
    source: Node = bound["self"]
    return source if signature(value(node)) == signature(value(source)) else None


def _input(editor: Editor, node: Node, bound: Bound) -> Node | None:
    source: Node = bound["self"]
    return source


def _to(editor: Editor, node: Node, bound: Bound) -> Node | None:
    source: Node = bound["self"]
    before, after = value(source), value(node)
    if bound.get("copy") or bound.get("memory_format") is not None or before.device != after.device:
        return None
    if before.dtype == after.dtype:
        return source
    if node.target is _aten.to.dtype:
        return None
    return editor.call(node, _aten.to.dtype, source, after.dtype)


def _dropout(editor: Editor, node: Node, bound: Bound) -> Node | None:
    source: Node = bound["input"]
    return source if not bound["train"] or bound["p"] == 0 else None


def _transpose(editor: Editor, node: Node, bound: Bound) -> Node | None:
    source: Node = bound["self"]
    dims = sorted((bound["dim0"], bound["dim1"]))
    if dims[0] == dims[1]:
        return source
    if source.target is _aten.transpose.int and sorted(source.args[1:]) == dims:  # type: ignore[type-var]
        origin = source.args[0]
        return origin if isinstance(origin, Node) else None
    if [bound["dim0"], bound["dim1"]] != dims:
        return editor.call(node, _aten.transpose.int, source, *dims)
    return None


def _view(editor: Editor, node: Node, bound: Bound) -> Node | None:
    source: Node = bound.get("self") or bound["input"]
    shape = value(node).shape
    if tuple(map(str, shape)) == tuple(map(str, value(source).shape)):
        return source
    sizes = canonical_sizes(shape, bound.get("size"))
    if sizes is None:
        return None
    if source.target is _aten.view.default:
        inner = source.args[0]
        if isinstance(inner, Node) and viewable(value(inner), shape):
            return editor.call(node, _aten.view.default, inner, sizes)
    if node.target is _aten.view.default and list(bound["size"]) == sizes:
        return None
    if not viewable(value(source), shape):
        return None
    return editor.call(node, _aten.view.default, source, sizes)


def _slice(editor: Editor, node: Node, bound: Bound) -> Node | None:
    source: Node = bound["self"]
    if bound.get("step", 1) != 1:
        return None
    dim = bound["dim"]
    start = bound["start"] or 0
    end = start + bound["length"] if "length" in bound else bound["end"]
    size = value(source).shape[dim]
    if start == 0 and (end is None or end == _END):
        return source
    if not all(isinstance(n, int) for n in (size, start, size if end is None else end)):
        return None
    start, end = _inside(start, size), _inside(size if end is None else end, size)
    if (start, end) == (0, size):
        return source
    if node.target is _aten.slice.Tensor and node.args == (source, dim, start, end):
        return None
    return editor.call(node, _aten.slice.Tensor, source, dim, start, end)


def _inside(index: int, size: int) -> int:
    return max(0, min(index + size if index < 0 else index, size))


def _split(editor: Editor, node: Node, bound: Bound) -> Node | None:
    source: Node = bound.get("self") or bound["input"]
    dim = bound["dim"]
    sizes = [part.shape[dim] for part in value(node)]
    if not all(isinstance(size, int) for size in sizes):
        return None
    if node.target is _aten.split_with_sizes.default and list(bound["split_sizes"]) == sizes:
        return split_below_view(editor, node)
    return editor.call(node, _aten.split_with_sizes.default, source, sizes, dim)


def _cat(editor: Editor, node: Node, bound: Bound) -> Node | None:
    """Drop the empty tensors of shape [0] that torch lets one write; a cat of one tensor is that one."""
    parts = [part for part in bound["tensors"] if tuple(value(part).shape) != (0,)]
    if len(parts) == 1 and value(parts[0]).dtype == value(node).dtype:
        only: Node = parts[0]
        # cat gives fresh memory: whoever writes into it must not write into its only part.
        aliases = Aliases(editor.graph)
        return None if (aliases.roots(only) | aliases.roots(node)) & aliases.written else only
    if 0 < len(parts) < len(bound["tensors"]):
        return editor.call(node, _aten.cat.default, parts, bound["dim"])
    return None


def _square(editor: Editor, node: Node, bound: Bound) -> Node | None:
    return editor.call(node, _aten.pow.Tensor_Scalar, bound["self"], 2)


_RULES: dict[str, Rule] = {
    **dict.fromkeys(("contiguous", "expand", "expand_as"), _unchanged),
    **dict.fromkeys(("alias", "detach", "detach_"), _input),
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten"), _view),
    **dict.fromkeys(("slice", "narrow"), _slice),
    **dict.fromkeys(("split", "chunk", "split_with_sizes", "tensor_split"), _split),
    "to": _to,
    "type_as": _to,
    "dropout": _dropout,
    "transpose": _transpose,
    "cat": _cat,
    "concat": _cat,
    "square": _square,
}


def _apply_rules(graph: Graph) -> int:
    editor = Editor(graph)
    edits = 0
    for node in list(graph.nodes):
        if node in editor.removed or node.op != "call_function":
            continue
        if not isinstance(node.target, OpOverload):
            continue
        bound = positive_dims(node.target, bind(node.target, node.args, dict(node.kwargs)))
        args, kwargs = spell(node.target, bound)
        if repr((args, kwargs)) != repr((node.args, dict(node.kwargs))):
            node.args, node.kwargs = args, kwargs
            settle(node, value(node))
            edits += 1
        rule = _RULES.get(op_name(node.target).removeprefix("aten::"))
        if rule is None or not node.target._schema.name.startswith("aten::"):
            continue
        new = rule(editor, node, bound)
        if new is not None:
            editor.replace(node, new)
            edits += 1
    return edits


def _cut(node: Node) -> tuple[int, int]:
    start, end = node.args[2:4]
    assert isinstance(start, int) and isinstance(end, int)
    return start, end


def _slices_to_splits(graph: Graph) -> int:
    """Turn slices that together cut one tensor up along a dimension into one split."""
    groups: dict[tuple[Node, int], list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.target is _aten.slice.Tensor and len(node.args) == 4:
            source, dim, start, end = node.args
            if isinstance(start, int) and isinstance(end, int):
                groups[source, dim].append(node)
    editor = Editor(graph)
    edits = 0
    for (source, dim), slices in groups.items():
        cuts = sorted({_cut(node) for node in slices})
        ends = [0, *(end for _, end in cuts)]
        if [start for start, _ in cuts] != ends[:-1] or ends[-1] != value(source).shape[dim]:
            continue
        if not all(start < end for start, end in cuts):
            continue
        sizes = [end - start for start, end in cuts]
        split = editor.call(slices[0], _aten.split_with_sizes.default, source, sizes, dim)
        parts = {cut: editor.call_any(slices[0], operator.getitem, split, i) for i, cut in enumerate(cuts)}
        for node in slices:
            editor.replace(node, parts[_cut(node)])
        edits += len(slices)
    return edits


def canonicalise(graph: Graph, context: PassContext | None = None) -> int:
    """Bring `graph` to the canonical form; returns how many edits that took."""
    total = 0
    while True:
        edits = _apply_rules(graph) + _slices_to_splits(graph)
        total += edits
        if not edits:
            return total


CANONICALISE = GraphPass(name="canonicalise", rewrite=canonicalise)
