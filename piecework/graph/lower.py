"""Chooses for each named op of a piece the implementation that runs, once, before the piece compiles."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from piecework import ops
from piecework.compile.source import ByCall
from piecework.graph.binding import MAX_TOKENS
from piecework.graph.recorder import Recorder
from piecework.graph.symbols import fresh_fakes, new_fake_mode, symbolic_sizes
from piecework.ops.registry import DEFAULT_ORDER, NAMESPACE, REFERENCE

log = logging.getLogger("piecework.graph")
_view = torch.ops.aten.view.default
_split = torch.ops.aten.split_with_sizes.default


def named_op(target: Any) -> ops.Op | None:
    """Return the named op that a node's target is, or None."""
    if isinstance(target, torch._ops.OpOverload) and target.namespace == NAMESPACE:
        return ops.get(target._opname)
    return None


def choose(op: ops.Op, order: Sequence[str], args: Sequence[Any]) -> ops.Implementation | None:
    """Return the implementation that runs a call with `args`, tensors without data, at any size.

    None: which one supports the call depends on the number of tokens, so it must be asked at each call.
    """
    mode = next((a.fake_mode for a in args if isinstance(a, FakeTensor)), None)
    env = mode.shape_env if mode is not None else None
    before = len(env.guards) if env is not None else 0
    with symbolic_sizes():
        chosen = op.resolve(order, *args)
    if env is not None and len(env.guards) > before:
        del env.guards[before:]
        return None
    return chosen


def direct(graph: fx.Graph, order: Sequence[str]) -> dict[fx.Node, Callable[..., Any]]:
    """Map each named op's node to the function that implements it, with the op's arguments."""
    found: dict[fx.Node, Callable[..., Any]] = {}
    for node in graph.nodes:
        op = named_op(node.target)
        if op is not None:
            chosen = choose(op, order, _arguments(node))
            found[node] = chosen.run if chosen is not None else ByCall(op.name, tuple(order))
    return found


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    """The values that a call gets, without data, its keyword arguments in the schema's order."""
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    return (*args, *(kwargs[name] for name in names[len(args) :] if name in kwargs))


@dataclass
class Inlined:
    """A piece in plain torch operations, on tensors of a mode of its own; `inputs` are its placeholders'."""

    graph_module: fx.GraphModule
    inputs: list[Tensor]
    mode: FakeTensorMode


def inline(
    piece: fx.GraphModule,
    order: Sequence[str],
    *,
    tokens: int | None = None,
    max_tokens: int = MAX_TOKENS,
) -> Inlined:
    """Write a piece in plain torch operations, so that a compiler can fuse what its named ops mean.

    A named op is replaced by its reference where that is what would run, or where what would run says that
    it gains nothing over fused code (`inline`); any other stays, and the compiler calls it. With `tokens`
    all sizes are static.
    """
    values = [node.meta["val"] for node in piece.graph.find_nodes(op="placeholder")]
    names = [node.name for node in piece.graph.find_nodes(op="placeholder")]
    mode = new_fake_mode()
    with symbolic_sizes(), torch.inference_mode(False), torch.no_grad():
        inputs = fresh_fakes(values, mode, tokens, max_tokens)
        recorder = Recorder(mode, list(zip(names, inputs, strict=True)))
        with mode, recorder:
            outputs = _Inliner(piece, order).run(*inputs)
        recorder.finish(list(outputs))
    return Inlined(fx.GraphModule(nn.Module(), recorder.graph), list(inputs), mode)


class _Inliner(fx.Interpreter):
    """Runs a piece with the references in place of their ops."""

    def __init__(self, piece: fx.GraphModule, order: Sequence[str]) -> None:
        super().__init__(piece, garbage_collect_values=False)
        self._order = order
        # By id of a part: the tensor that was split along its last dimension, and where the part starts.
        self._parts: dict[int, tuple[Tensor, int]] = {}

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is _split and args[-1] in (-1, args[0].dim() - 1) and not kwargs:
            return self._split(args[0], args[1])
        if target is _view and (heads := self._heads(*args)) is not None:
            return heads
        op = named_op(target)
        if op is None or op.mutates:
            return super().call_function(target, args, kwargs)
        chosen = choose(op, self._order, args)
        if chosen is not None and (chosen.inline or chosen.name == REFERENCE):
            return op.reference(*args, **kwargs)
        self._check_default(op, chosen, args)
        return super().call_function(target, args, kwargs)

    def _split(self, whole: Tensor, sizes: Sequence[int]) -> Any:
        parts = torch.split_with_sizes(whole, list(sizes), -1)
        start = 0
        for part, size in zip(parts, sizes, strict=True):
            self._parts[id(part)] = (whole, start)
            start += size
        return parts

    def _heads(self, part: Tensor, shape: Sequence[Any]) -> Tensor | None:
        """Turn part.view(-1, n, d) into a slice of whole.view(-1, N, d), which is the same memory.

        Inductor takes a view of a tensor with gaps between its rows for impossible at one row, and
        assumes that there are more; then one token would need a piece of its own.
        """
        whole, start = self._parts.get(id(part), (None, 0))
        if whole is None or len(shape) != 3 or shape[0] != -1 or not whole.is_contiguous():
            return None
        n, d = shape[1:]
        if whole.dim() != 2 or start % d or whole.shape[1] % d:
            return None
        return whole.view(-1, whole.shape[1] // d, d)[:, start // d : start // d + n]

    def _check_default(self, op: ops.Op, chosen: ops.Implementation | None, args: Sequence[Any]) -> None:
        """Warn where a compiled call of the op, which goes by dispatch key, runs something else."""
        device = next((a.device for a in args if isinstance(a, Tensor)), None)
        key = {"cpu": "CPU", "cuda": "CUDA"}.get(device.type if device else "cpu", "PrivateUse1")
        if choose(op, DEFAULT_ORDER[key], args) is not chosen:
            log.warning(
                "%s: a compiled piece calls the implementation of the dispatch key %s, not the device's (%s)",
                op.qualified_name,
                key,
                chosen.name if chosen else "chosen at each call",
            )
