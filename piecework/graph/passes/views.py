"""Views in canonical form: their sizes, and how they change places with splits."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from piecework.graph.passes.aliases import is_view
from piecework.graph.passes.arguments import is_getitem
from piecework.graph.passes.editor import Editor
from piecework.graph.passes.fakes import value
from piecework.graph.symbols import symbolic_sizes

_aten = torch.ops.aten


def canonical_sizes(shape: Sequence[Any], written: Sequence[Any] | None) -> list[Any] | None:
    """The sizes by which a view to `shape` is written: numbers, and -1 for one symbolic dimension.

    With several symbolic dimensions those keep what was `written` for them; None if nothing was.
    """
    symbolic = [i for i, size in enumerate(shape) if not isinstance(size, int)]
    if len(symbolic) < 2:
        return [-1 if i in symbolic else size for i, size in enumerate(shape)]
    if written is None or len(written) != len(shape):
        return None
    return [written[i] if i in symbolic else size for i, size in enumerate(shape)]


def viewable(tensor: Tensor, shape: Sequence[Any]) -> bool:
    """Whether a fake tensor can be viewed in `shape` without a copy."""
    try:
        with symbolic_sizes():
            tensor.view(shape)
    except (RuntimeError, ValueError):
        return False
    return True


def split_below_view(editor: Editor, split: Node) -> Node | None:
    """Turn split(view(x, [.., heads, size]), [a, b], heads) into views of split(x, [a * size, b * size]).

    Returns the new split for those results that are not views of it; None if it doesn't apply.
    """
    view, sizes, dim = split.args[0], split.args[1], split.args[2] if len(split.args) > 2 else 0
    if not isinstance(view, Node) or view.target is not _aten.view.default or not is_view(view):
        return None
    source = view.args[0]
    if not isinstance(source, Node) or not isinstance(sizes, list | tuple) or not isinstance(dim, int):
        return None
    outer, inner = value(source).shape, value(view).shape
    last = len(outer) - 1
    if dim != last or len(inner) != len(outer) + 1 or not isinstance(inner[-1], int):
        return None
    if [str(s) for s in outer[:-1]] != [str(s) for s in inner[:-2]]:
        return None
    if not all(is_getitem(user) for user in split.users):
        return None
    heads: list[Any] = list(sizes)
    rows = [size * inner[-1] for size in heads]
    parts = editor.call(split, _aten.split_with_sizes.default, source, rows, last)
    for item in list(split.users):
        part = editor.call_any(item, operator.getitem, parts, item.args[1])
        shape = value(item).shape
        written = view.args[1]
        assert isinstance(written, list | tuple)
        target = canonical_sizes(shape, [*written[:-2], shape[-2], shape[-1]])
        editor.replace(item, editor.call(item, _aten.view.default, part, target))
    return parts
