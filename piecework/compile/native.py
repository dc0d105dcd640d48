"""Pieces of the CPU's kernels: what the eager piece would call one by one is one call of the library.

Nothing is said here about any op. The eager piece is made, and runs once on tensors without data while the
kernels that it calls are written down (record.py); the list is what runs from then on, with the same
results. A piece that does anything else than call kernels isn't native.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from piecework.compile.base import CompileContext, NotForCompilerError, first_line
from piecework.compile.eager import write_python
from piecework.compile.native_piece import NAME, NativePiece
from piecework.compile.record import NotNativeError, record
from piecework.compile.source import ByCall, make_function
from piecework.errors import ConfigError
from piecework.graph.lower import direct, named_op
from piecework.graph.symbols import fresh_fakes, new_fake_mode, symbolic_sizes
from piecework.native import library


class NativeCompiler:
    """See the module. Without the library it is a ConfigError."""

    name = NAME
    parallel = False  # torch keeps global state while it runs on tensors without data

    def __init__(self) -> None:
        if library() is None:
            known = "another one where the library of kernels can't be built (the log says why)"
            raise ConfigError("compiler", NAME, known)

    def compile(self, piece: fx.GraphModule, context: CompileContext) -> NativePiece:
        """Write the piece down, for all sizes."""
        values = [node.meta["val"] for node in piece.graph.find_nodes(op="placeholder")]
        mode = new_fake_mode()
        try:
            with symbolic_sizes(), torch.inference_mode(False), torch.no_grad():
                inputs = fresh_fakes(values, mode, None, context.max_tokens)
                return NativePiece(record(_function(piece, context), inputs, mode))
        except NotNativeError as error:
            raise NotForCompilerError(NAME, error.reason) from error
        except Exception as error:
            raise NotForCompilerError(NAME, first_line(error)) from error


def _function(piece: fx.GraphModule, context: CompileContext) -> Callable[..., Sequence[Tensor]]:
    """The eager piece, with implementations that name their op where they can't be written down."""
    named: dict[Any, Callable[..., Any]] = {}
    targets = direct(piece.graph, context.device.op_order)
    for node, run in targets.items():
        targets[node] = named.setdefault((node.target, run), _naming(_name(node), run))
    return make_function(*write_python(piece.graph, targets))


def _name(node: fx.Node) -> str:
    op = named_op(node.target)
    return op.qualified_name if op is not None else str(node.target)


def _naming(op: str, run: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if isinstance(run, ByCall):
            raise NotNativeError(f"what runs {op} depends on the number of tokens")
        try:
            return run(*args, **kwargs)
        except NotNativeError as error:
            raise NotNativeError(f"{op} ({error.reason})") from error

    return call
