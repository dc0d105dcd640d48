"""From split pieces to a program: every tensor that crosses a cut gets its slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from piecework.compile.base import CompiledPiece
from piecework.devices.base import Device
from piecework.graph.binding import Binding
from piecework.graph.program import HoleCall, PieceCall, Program, Slot, Step
from piecework.graph.split import Hole, PieceGraph, SplitGraph


def link(
    graph: SplitGraph,
    kinds: Sequence[int],
    pieces: Sequence[CompiledPiece],
    bindings: Sequence[Binding],
    device: Device,
    *,
    single: bool,
    max_tokens: int,
) -> Program:
    """Give every tensor that crosses a cut its slot, and write the steps.

    `kinds` are the numbers of the distinct pieces, piece by piece; `bindings` belong to the graph's
    placeholders.
    """
    slots: dict[fx.Node, int] = {node: i for i, node in enumerate(graph.placeholders)}
    for piece in graph.pieces:
        for node in piece.outputs:
            slots[node] = len(slots)
    keep = {slots[n] for n in graph.outputs} | set(range(len(graph.placeholders)))
    frees = _frees(graph, slots, keep)
    steps: list[Step] = []
    numbers = iter(kinds)
    for part, free in zip(graph.parts, frees, strict=True):
        if isinstance(part, PieceGraph):
            ins = tuple(slots[n] for n in part.inputs)
            outs = tuple(slots[n] for n in part.outputs)
            steps.append(PieceCall(next(numbers), ins, outs, free))
        else:
            place: Any = lambda n: Slot(slots[n])  # noqa: E731 - typed as fx's own argument would be
            args, kwargs = fx.map_arg((part.args, part.kwargs), place)
            result = slots[part.buffer] if part.buffer is not None else None
            steps.append(HoleCall(part.name, part.target, args, kwargs, result, free))
    inputs = [n for n, b in zip(graph.placeholders, bindings, strict=True) if b.kind == "input"]
    return Program(
        steps,
        pieces,
        bindings,
        len(slots),
        [slots[n] for n in graph.outputs],
        device,
        single=single,
        max_tokens=max_tokens,
        token_input=next((i for i, n in enumerate(inputs) if _counts_tokens(n)), None),
    )


def _counts_tokens(node: fx.Node) -> bool:
    shape = node.meta["val"].shape
    return len(shape) > 0 and isinstance(shape[0], torch.SymInt)


def _frees(graph: SplitGraph, slots: Mapping[fx.Node, int], keep: set[int]) -> list[tuple[int, ...]]:
    seen = set(keep)
    frees: list[tuple[int, ...]] = []
    for part in reversed(graph.parts):
        used = {slots[n] for n in _tensors(part)}
        frees.append(tuple(sorted(used - seen)))
        seen |= used
    return frees[::-1]


def _tensors(part: PieceGraph | Hole) -> list[fx.Node]:
    if isinstance(part, PieceGraph):
        return [*part.inputs, *part.outputs]
    found: list[fx.Node] = [part.buffer] if part.buffer is not None else []
    return [*found, *_nodes((part.args, part.kwargs))]


def _nodes(value: Any) -> list[fx.Node]:
    if isinstance(value, fx.Node):
        return [value]
    values = value.values() if isinstance(value, Mapping) else value
    return [n for v in values for n in _nodes(v)] if isinstance(value, list | tuple | Mapping) else []
