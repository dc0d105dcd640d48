"""Adds and replaces nodes while a pass runs, with their fake values computed at once."""

from __future__ import annotations

from typing import Any

from torch._ops import OpOverload
from torch.fx import Graph, Node

from piecework.graph.passes.fakes import fake_mode, run_fake, settle


class Editor:
    """Edits one graph. For passes that are written by hand; pattern passes don't need it.

    `removed` holds the nodes that are gone, for loops over a list that was made before.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.removed: set[Node] = set()
        self._mode = fake_mode(graph)

    def call(self, before: Node, target: OpOverload, *args: Any, **kwargs: Any) -> Node:
        """Insert a call in front of `before`; raises what the op raises if its arguments don't fit."""
        with self.graph.inserting_before(before):
            return self._finish(self.graph.call_function(target, args, kwargs))

    def call_any(self, before: Node, target: Any, *args: Any) -> Node:
        """Insert a call of a plain function, `operator.getitem` say."""
        with self.graph.inserting_before(before):
            return self._finish(self.graph.call_function(target, args))

    def replace(self, old: Node, new: Node) -> None:
        """Let every user of `old` use `new`, and remove `old`."""
        old.replace_all_uses_with(new)
        self.graph.erase_node(old)
        self.removed.add(old)

    def _finish(self, node: Node) -> Node:
        try:
            with self._mode:
                settle(node, run_fake(node))
        except BaseException:
            self.graph.erase_node(node)
            raise
        return node
