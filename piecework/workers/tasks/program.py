"""A Program of this package as task functions: weights, KV cache and index tensors are arguments."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from piecework.devices import Device
from piecework.graph.program import PieceCall, Program
from piecework.kvcache import AttentionMetadata
from piecework.layers.attention import AttentionSpec
from piecework.runner.attention import PagedAttention
from piecework.workers.tasks.functions import Function
from piecework.workers.tasks.tags import Parameter, Tag

INDEX = ("slots", "page_table", "query_starts", "context_lengths")


@dataclass(frozen=True)
class TaskCache:
    """The KV cache of a task, layer by layer."""

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    key_scales: Sequence[Tensor] = ()

    def layer(self, index: int) -> tuple[Tensor, ...]:
        """Return a layer's keys and values, which are floats."""
        return (self.keys[index], self.values[index])


class BodyCall:
    """Runs a model's body. Parameters: weights, inputs, index tensors, hidden, KV cache, longest query."""

    def __init__(self, program: Program, specs: Sequence[AttentionSpec], op_order: Sequence[str]) -> None:
        self._program = program
        self._specs = specs
        self._order = op_order

    @torch.inference_mode()
    def __call__(self, *given: Tensor | int) -> None:
        """Write the hidden states of T tokens into `hidden` [T, H]."""
        tensors = [value for value in given if isinstance(value, Tensor)]
        longest = given[-1]
        assert isinstance(longest, int)
        weights, rest = _split(tensors, len(self._program.weights))
        inputs, rest = _split(rest, len(self._program.inputs))
        index, rest = _split(rest, len(INDEX))
        (hidden,), cache = _split(rest, 1)
        layers = len(cache) // 2
        attend = PagedAttention(self._specs, TaskCache(cache[:layers], cache[layers:]), self._order)
        slots, table, starts, lengths = index
        metadata = AttentionMetadata(slots, table, starts, lengths, longest)

        def fill(layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
            attend(layer, q, k, v, out, metadata)

        hidden.copy_(self._program.with_weights(weights).run(inputs, fill))


class HeadCall:
    """Runs a model's head on some rows. Parameters: weights, hidden, rows, logits."""

    def __init__(self, program: Program) -> None:
        self._program = program

    @torch.inference_mode()
    def __call__(self, *given: Tensor) -> None:
        """Write the logits of `rows` [R] of `hidden` [T, H] into `logits` [R, V]."""
        weights, (hidden, rows, logits) = _split(given, len(self._program.weights))
        logits.copy_(self._program.with_weights(weights).run([hidden[rows]]))


def body_function(program: Program, specs: Sequence[AttentionSpec], device: Device) -> Function:
    """Declare the task that runs a model's body; a program that couldn't be traced is refused."""
    parameters = [Parameter(f"weight:{name}", Tag.INPUT) for name in program.weights]
    parameters += [Parameter(name, Tag.INPUT) for name in (*program.inputs, *INDEX)]
    parameters += [Parameter("hidden", Tag.OUTPUT)]
    for kind in ("keys", "values"):
        parameters += [Parameter(f"{kind}.{layer}", Tag.INOUT) for layer in range(len(specs))]
    parameters += [Parameter("longest")]
    call = BodyCall(program, specs, device.op_order)
    return Function.with_parameters("body", call, parameters, content_of(program, repr(specs)))


def head_function(program: Program) -> Function:
    """Declare the task that runs a model's head."""
    parameters = [Parameter(f"weight:{name}", Tag.INPUT) for name in program.weights]
    parameters += [Parameter("hidden", Tag.INPUT), Parameter("rows", Tag.INPUT)]
    parameters += [Parameter("logits", Tag.OUTPUT_EXISTING)]
    return Function.with_parameters("head", HeadCall(program), parameters, content_of(program, "head"))


def content_of(program: Program, more: str) -> str:
    """Return a digest of what a program does: its pieces' structure, its compilers and its wiring."""
    if program.opaque_reason is not None:
        raise ValueError(f"a model that isn't traced can't be a task: {program.opaque_reason}")
    steps = [
        (s.distinct, s.inputs, s.outputs) if isinstance(s, PieceCall) else (s.op, s.args, s.kwargs)
        for s in program.steps
    ]
    pieces = [(record.key, record.compiler) for record in program.records]
    shapes = [(b.kind, b.name, b.tensor is not None and tuple(b.tensor.shape)) for b in program.bindings]
    text = repr((steps, pieces, shapes, program.device.name, program.device.op_order, more))
    return hashlib.sha256(text.encode()).hexdigest()


def _split(tensors: Sequence[Tensor], count: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    return tensors[:count], tensors[count:]
