"""A copy into a buffer that is only read afterwards is what was copied."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from piecework.graph.passes.aliases import Aliases, inputs_of
from piecework.graph.passes.arguments import bind
from piecework.graph.passes.base import AT_LEAST_ONE, GraphPass, Outcome, PassContext
from piecework.graph.passes.fakes import signature

_copy = torch.ops.aten.copy_.default


def erase_copy() -> GraphPass:
    """copy_ into memory of the graph's own, such as a residual's -> the source, for who reads it later.

    That is right where nobody can tell: the buffer is no input, constant or result, nothing writes into it
    or into the source afterwards, and all who read it afterwards read just the part that was copied.
    """
    return GraphPass(name="erase_copy", rewrite=_rewrite, expect=AT_LEAST_ONE)


def _rewrite(graph: Graph, context: PassContext) -> Outcome:
    outcome = Outcome()
    for copy in graph.find_nodes(op="call_function", target=_copy):
        found = bind(_copy, copy.args, dict(copy.kwargs))
        target, source = found["self"], found["src"]
        reason = _refusal(graph, copy, target, source)
        if reason is not None:
            outcome.refused[reason] += 1
            continue
        copy.replace_all_uses_with(source)
        target.replace_all_uses_with(source, delete_user_cb=_after(copy).__contains__)
        graph.erase_node(copy)
        outcome.matches += 1
    return outcome


def _refusal(graph: Graph, copy: Node, target: Node, source: Node) -> str | None:
    """Why the copy must stay; None if it need not."""
    aliases = Aliases(graph)
    buffer, origin = aliases.roots(target), aliases.roots(source)
    if signature(target.meta["val"]) != signature(source.meta["val"]):
        return "the source has another shape, layout or dtype than the buffer"
    if any(root.op != "call_function" for root in buffer):
        return "the buffer is not the graph's own"
    if buffer & origin:
        return "the source is part of the buffer"
    later = _after(copy)
    for writer, written in aliases.writes:
        if writer in later and written & (buffer | origin):
            return "the buffer or the source is written afterwards"
    for node in later:
        shares = [n for n in inputs_of(node) if aliases.roots(n) & buffer]
        if node.op == "output" and shares:
            return "the buffer is a result of the graph"
        # A view that was made of the copy afterwards is fine: its own argument will be the source.
        if any(n not in (copy, target) and n not in later for n in shares):
            return "another view of the buffer is read afterwards"
    return None


def _after(node: Node) -> set[Node]:
    found: set[Node] = set()
    node = node.next
    while node.op != "root":
        found.add(node)
        node = node.next
    return found
