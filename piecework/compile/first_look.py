"""A look at what another's compiler made: it is called once on zeros, and its first results are compared.

Such a compiler may fail at the first call only, or give what isn't the graph's; without this look a request
would find out, in the middle of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from piecework.compile.base import CompileContext, CompileError, FunctionPiece, first_line
from piecework.graph.lower import Inlined
from piecework.graph.symbols import evaluate, expression, fresh_fakes, new_fake_mode, sources, symbolic_sizes

_ROWS = 3  # no size that a compiler might take for a constant


def looked_at(function: Any, inlined: Inlined, compiler: str) -> FunctionPiece:
    """Make a piece of what the compiler gave; a CompileError where that, or its first result, is wrong."""
    if not callable(function):
        raise CompileError(compiler, f"it gave {_kind(function)} and no function")
    graph = inlined.graph_module.graph
    inputs = graph.find_nodes(op="placeholder")
    symbols = sources(inputs)
    (outputs,) = graph.find_nodes(op="output")
    wanted = [node.meta["val"] for node in outputs.args[0]]
    positions = {node: position for position, node in enumerate(inputs)}

    def look(*given: Tensor) -> Sequence[Tensor]:
        known = {s: given[positions[node]].shape[dim] for s, (node, dim) in symbols.items()}
        results = function(*given)
        expected = [_described([_size(n, known) for n in t.shape], t.dtype) for t in wanted]
        found = _describe(results)
        if found != expected:
            raise CompileError(compiler, f"its code gives {_listed(found)} and not {_listed(expected)}")
        piece.function = function
        return results  # type: ignore[no-any-return]

    piece = FunctionPiece(look, compiler)
    return piece


def try_once(piece: FunctionPiece, graph_module: fx.GraphModule, context: CompileContext) -> None:
    """Call the piece on a few rows of zeros, with its weights where they are known.

    Raises CompileError where the call fails.
    """
    values = [node.meta["val"] for node in graph_module.graph.find_nodes(op="placeholder")]
    with symbolic_sizes():
        shapes = fresh_fakes(values, new_fake_mode(), min(_ROWS, context.max_tokens))
    weights = context.calls[0] if context.calls else [None] * len(shapes)
    inputs = [_zeros(like, context) if w is None else w for like, w in zip(shapes, weights, strict=True)]
    try:
        with torch.inference_mode():
            piece(inputs)
            context.device.synchronize()
    except CompileError:
        raise
    except Exception as error:
        raise CompileError(
            piece.compiler, f"its code fails at the first call: {first_line(error)}"
        ) from error


def _zeros(like: Tensor, context: CompileContext) -> Tensor:
    length = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
    return context.device.zeros((length,), like.dtype).as_strided(like.shape, like.stride())


def _size(size: Any, known: dict[Any, int]) -> int:
    return int(evaluate(expression(size), dict(known)))


def _describe(results: Any) -> list[str] | str:
    if not isinstance(results, list | tuple):
        return _kind(results)
    return [_described(r.shape, r.dtype) if isinstance(r, Tensor) else _kind(r) for r in results]


def _described(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _listed(found: list[str] | str) -> str:
    return found if isinstance(found, str) else "(" + ", ".join(found) + ")"
