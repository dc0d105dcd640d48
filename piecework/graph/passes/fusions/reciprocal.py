"""1 / (1 / x) is x, nearly."""

from __future__ import annotations

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from piecework.graph.passes.aliases import Aliases
from piecework.graph.passes.arguments import bind
from piecework.graph.passes.base import AT_LEAST_ONE, GraphPass, Outcome, PassContext
from piecework.graph.passes.bounds import tolerance
from piecework.graph.passes.editor import Editor

_aten = torch.ops.aten
_SPELLINGS = (_aten.reciprocal.default, _aten.pow.Tensor_Scalar, _aten.mul.Tensor)


def div_fuse() -> GraphPass:
    """1 / (1 / x) -> x, in float32 and bfloat16.

    Never bitwise: both divisions round, and what is so small that 1 / x overflows became 0. In float16 that
    begins at 1.5e-5, hence not there. The quantise op carries a scale and its reciprocal so that no such
    pair comes up; the pass is for graphs from elsewhere, and off unless it is asked for.
    """
    return GraphPass(
        name="div_fuse", rewrite=_rewrite, bound=tolerance(float32=1e-6, bfloat16=1.6e-2), expect=AT_LEAST_ONE
    )


def _rewrite(graph: Graph, context: PassContext) -> Outcome:
    aliases, editor, outcome = Aliases(graph), Editor(graph), Outcome()
    # The last one first: it stands for the whole, however many nodes that is.
    for node in reversed(list(graph.nodes)):
        inner = _inverted(node) if node.users else None
        x = _inverted(inner) if inner is not None else None
        if x is None:
            continue
        before, after = x.meta["val"], node.meta["val"]
        if before.dtype not in (torch.float32, torch.bfloat16) or before.dtype != after.dtype:
            outcome.refused["its dtype overflows too early, or changes"] += 1
        # The result is memory of its own: who writes into it must not write into x, nor the other way.
        elif (aliases.roots(node) | aliases.roots(x)) & aliases.written:
            outcome.refused["memory that it reads or returns is written"] += 1
        elif any(user.op == "output" for user in node.users):
            outcome.refused["it is a result of the graph, which must not become one of its inputs"] += 1
        else:
            editor.replace(node, x)
            outcome.matches += 1
    return outcome


def _inverted(node: Node) -> Node | None:
    """The node that `node` is 1 over, written as a reciprocal, a power, or a product of one with 1."""
    target = node.target
    if not isinstance(target, OpOverload) or target not in _SPELLINGS:
        return None
    found = bind(target, node.args, dict(node.kwargs))
    x = found["self"]
    if not isinstance(x, Node):
        return None
    if target is _aten.mul.Tensor:
        # `1 / x` is traced as the reciprocal times 1.
        return _inverted(x) if not isinstance(found["other"], Node) and found["other"] == 1 else None
    return x if found.get("exponent", -1) == -1 else None
