"""Pieces by any backend that is registered for `torch.compile`, named `dynamo:<backend>`.

The backend is called as dynamo calls it, with a graph and inputs without data, but once for all sizes and
without dynamo: no guards, so no recompilation. Vendors' compilers come in this way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from piecework.compile.base import CompileContext, CompileError, FunctionPiece, first_line
from piecework.compile.first_look import looked_at, try_once
from piecework.compile.registry import PREFIX
from piecework.errors import ConfigError
from piecework.graph.lower import Inlined, inline
from piecework.graph.symbols import assumptions, symbolic_sizes


class DynamoCompiler:
    """See the module. A name that no backend has is a ConfigError with the list of those there are."""

    parallel = False

    def __init__(self, backend: str) -> None:
        from torch._dynamo.backends.registry import list_backends, lookup_backend

        self.name = PREFIX + backend
        known = sorted(list_backends(exclude_tags=()))
        if backend not in known:
            allowed = "dynamo: and one of " + ", ".join(known)
            raise ConfigError("compiler", self.name, allowed)
        self._backend = lookup_backend(backend)

    def compile(self, piece: fx.GraphModule, context: CompileContext) -> FunctionPiece:
        """Give the backend the piece in plain torch operations, and call what it makes once.

        What fails there, or gives something else than the graph, is a CompileError.
        """
        inlined = inline(piece, context.device.op_order, tokens=context.tokens, max_tokens=context.max_tokens)
        try:
            function = self._call_backend(inlined)
        except Exception as error:
            raise CompileError(self.name, first_line(error)) from error
        if failed := assumptions(inlined.mode):
            raise CompileError(self.name, "it assumes of the number of tokens: " + "; ".join(failed))
        made = looked_at(function, inlined, self.name)
        if context.tokens is None:  # whoever compiles for one size alone has the inputs for a first call
            try_once(made, piece, context)
        return made

    def _call_backend(self, inlined: Inlined) -> Any:
        for node in inlined.graph_module.graph.nodes:
            if "val" in node.meta:
                node.meta["example_value"] = node.meta["val"]
        context = torch._guards.TracingContext(inlined.mode)
        with (
            torch._guards.tracing(context),
            symbolic_sizes(),
            torch.inference_mode(False),
            torch.no_grad(),
        ):
            return self._backend(inlined.graph_module, inlined.inputs)
