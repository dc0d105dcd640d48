"""Removes what nobody uses, and computes once what is computed twice."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from piecework.graph.passes.aliases import Aliases, has_effect, is_uninitialised
from piecework.graph.passes.arguments import op_name
from piecework.graph.passes.base import GraphPass, PassContext


def remove_dead(graph: Graph) -> int:
    """Remove calls without users that write nothing; returns how many. Placeholders stay."""
    removed = 0
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users and not has_effect(node):
            graph.erase_node(node)
            removed += 1
    return removed


def merge_common(graph: Graph, context: PassContext) -> int:
    """Let a call use the result of an equal earlier one in the same piece; returns how many did.

    Calls on both sides of a splitting op stay two: a merged one would have to be kept over the hole.
    """
    aliases = Aliases(graph)
    first: dict[Any, Node] = {}
    merged = 0
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if op_name(node.target) in context.splitting_ops:
            first = {}
            continue
        if has_effect(node) or is_uninitialised(node) or aliases.touches_written(node):
            continue
        arguments = map_arg((node.args, dict(node.kwargs)), lambda n: f"%{n.name}")
        key = (node.target, repr(arguments))
        twin = first.setdefault(key, node)
        if twin is not node:
            node.replace_all_uses_with(twin)
            graph.erase_node(node)
            merged += 1
    return merged


DEAD_CODE = GraphPass(name="dead_code", rewrite=lambda graph, _: remove_dead(graph))
COMMON_SUBEXPRESSIONS = GraphPass(name="common_subexpressions", rewrite=merge_common)
