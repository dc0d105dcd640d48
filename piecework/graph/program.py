"""A program: pieces and holes in order, and how they run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from piecework.devices.base import Device
from piecework.graph.binding import Binding

if TYPE_CHECKING:
    from piecework.compile.base import CompiledPiece
    from piecework.compile.pieces import PieceRecord
    from piecework.graph.passes.report import Report

ATTENTION = "piecework::attention"

HoleFn = Callable[[int, Tensor, Tensor, Tensor, Tensor], None]
"""fn(layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D], out [T, Hq, D]) writes `out`."""
Fills = Mapping[str, Callable[..., Any]]
"""What fills the holes of each op, by the op's name; a function gets the op's arguments."""


@dataclass(frozen=True)
class Slot:
    """Stands for a tensor among a hole's arguments: its place in the environment."""

    index: int


@dataclass(frozen=True)
class PieceCall:
    """Run piece number `distinct` on the tensors in `inputs`; put the results into `outputs`.

    All are indices into the environment. `frees` are those that nothing needs after this step.
    """

    distinct: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    frees: tuple[int, ...] = ()
    gather: Callable[[Sequence[Any]], tuple[Any, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "gather", _gather(self.inputs))


@dataclass(frozen=True)
class HoleCall:
    """Run the splitting op `op`: what fills it, else `function`, which is the op itself.

    `args` and `kwargs` hold a Slot for each tensor, and literals. `result`: where the op's result, a new
    tensor, must be copied to, if it has one.
    """

    op: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: int | None = None
    frees: tuple[int, ...] = ()

    def arguments(self, env: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments with tensors from the environment."""
        return (
            tuple(_fill(a, env) for a in self.args),
            {name: _fill(a, env) for name, a in self.kwargs.items()},
        )

    def run(self, env: Sequence[Any], fill: Callable[..., Any] | None) -> None:
        """Run it on the environment's tensors."""
        args, kwargs = self.arguments(env)
        value = (fill or self.function)(*args, **kwargs)
        if self.result is not None:
            env[self.result].copy_(value)


Step = PieceCall | HoleCall


class Program:
    """What runs in place of a model's forward: steps over an environment of tensors.

    The environment is a list; weights have their places in it from the start, by reference. Inputs are
    put at `input_slots`, results are found at `output_slots`.

    Attributes:
        steps: pieces and holes in the order in which they run.
        pieces: the distinct pieces that steps call by number.
        inputs: names of the inputs, in order.
        num_pieces, num_holes, num_distinct, graphs_traced: the counts.
        opaque_reason: why the model couldn't be traced; None for a program that was.
        max_tokens: the most tokens that a run may have. token_input: the number of the first input that
            has them as its first dimension, if there is one.
        seconds: how long each stage took to make it (`trace`, `passes`, `split`, `compile`).
        graph_module, distinct_graphs: the flat graph after passes and the distinct pieces', to look at.
        pass_report: what passes did; None where there were none.
        records: how each distinct piece was compiled.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        pieces: Sequence[CompiledPiece],
        bindings: Sequence[Binding],
        num_slots: int,
        output_slots: Sequence[int],
        device: Device,
        *,
        single: bool = True,
        max_tokens: int,
        token_input: int | None = None,
    ) -> None:
        self.token_input = token_input
        self.steps = tuple(steps)
        self.pieces = tuple(pieces)
        self.bindings = tuple(bindings)
        self.num_slots = num_slots
        self.input_slots = tuple(i for i, b in enumerate(bindings) if b.kind == "input")
        self.inputs = tuple(bindings[i].name for i in self.input_slots)
        self.output_slots = tuple(output_slots)
        self.device = device
        self.single = single
        self.max_tokens = max_tokens
        self.num_pieces = sum(isinstance(s, PieceCall) for s in self.steps)
        self.num_holes = sum(isinstance(s, HoleCall) for s in self.steps)
        self.num_distinct = len(self.pieces)
        self.graphs_traced = 1
        self.opaque_reason: str | None = None
        self.graph_module: fx.GraphModule | None = None
        self.distinct_graphs: tuple[fx.GraphModule, ...] = ()
        self.seconds: dict[str, float] = {}
        self.pass_report: Report | None = None
        self.records: tuple[PieceRecord, ...] = ()
        self._template: list[Any] = [b.tensor for b in bindings]
        self._template += [None] * (num_slots - len(bindings))

    @classmethod
    def opaque(cls, model: Callable[..., Any], device: Device, reason: str) -> Program:
        """Make the program of a model that can't be traced: one eager hole, which is the model."""
        return OpaqueProgram(model, device, reason)

    @property
    def weights(self) -> dict[str, Tensor]:
        """The weights by name, in the order of their places."""
        return {b.name: b.tensor for b in self.bindings if b.tensor is not None}

    def with_weights(self, weights: Sequence[Tensor]) -> Program:
        """Return the same program on other tensors, in the order of `weights`; nothing else is copied."""
        other = copy.copy(self)
        other._template = self._template.copy()
        places = [i for i, b in enumerate(self.bindings) if b.tensor is not None]
        for place, tensor in zip(places, weights, strict=True):
            other._template[place] = tensor
        return other

    def check(self, inputs: Sequence[Tensor]) -> None:
        """Refuse, with a ValueError, inputs of another number, or with more tokens than a run may have."""
        if len(inputs) != len(self.input_slots):
            raise ValueError(f"the program takes {len(self.input_slots)} inputs ({', '.join(self.inputs)})")
        if self.token_input is not None and (tokens := inputs[self.token_input].shape[0]) > self.max_tokens:
            raise ValueError(f"{tokens} tokens; the program is made for {self.max_tokens} at most")

    @property
    def takes_out(self) -> bool:
        """Whether it is one piece with one result, which the piece writes right into memory that is given."""
        return len(self.steps) == 1 and self.single and getattr(self.pieces[0], "direct", False)

    def environment(self, inputs: Sequence[Tensor]) -> list[Any]:
        """Make the environment of a run: weights and inputs in their places, the rest None."""
        self.check(inputs)
        env = self._template.copy()
        for slot, tensor in zip(self.input_slots, inputs, strict=True):
            env[slot] = tensor
        return env

    def results(self, env: Sequence[Any]) -> Any:
        """Take the program's results out of an environment after all steps."""
        if self.single:
            return env[self.output_slots[0]]
        return tuple(env[slot] for slot in self.output_slots)

    def run(
        self,
        inputs: Sequence[Tensor],
        fill: HoleFn | None = None,
        *,
        fills: Fills | None = None,
        out: Tensor | None = None,
    ) -> Any:
        """Run at the inputs' own size, without a graph.

        `fill` does attention; without it the op does what it means by itself, one causal sequence.
        `fills` names functions for other splitting ops. `out` is memory for the result, of a program that
        takes it.
        """
        env = self.environment(inputs)
        outputs = None if out is None else [out]
        assert outputs is None or self.takes_out, "this program makes its own results"
        holes = self.holes(fill, fills)
        pieces, launch = self.pieces, self.device.launch
        for step in self.steps:
            if isinstance(step, PieceCall):
                results = launch(pieces[step.distinct], step.gather(env), outputs)
                for slot, tensor in zip(step.outputs, results, strict=True):
                    env[slot] = tensor
                del results
            else:
                step.run(env, holes.get(step.op))
            for slot in step.frees:
                env[slot] = None
        return self.results(env)

    @staticmethod
    def holes(fill: HoleFn | None, fills: Fills | None = None) -> dict[str, Callable[..., Any]]:
        """Return what fills each splitting op, by name, as functions of the op's own arguments."""
        found: dict[str, Callable[..., Any]] = dict(fills or {})
        if fill is not None:

            def attention(q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer: int, *_: Any) -> None:
                fill(layer, q, k, v, out)

            found[ATTENTION] = attention
        return found


class OpaqueProgram(Program):
    """A model that runs as it is. Its attention is bound for the time of a run."""

    def __init__(self, model: Callable[..., Any], device: Device, reason: str) -> None:
        super().__init__([], [], [], 0, [], device, max_tokens=2**63 - 1)
        self._model = model
        self.opaque_reason = reason
        self.num_holes = 1
        self.graphs_traced = 0

    @torch.no_grad()
    def run(
        self,
        inputs: Sequence[Tensor],
        fill: HoleFn | None = None,
        *,
        fills: Fills | None = None,
        out: Tensor | None = None,
    ) -> Any:
        """Call the model; see Program.run."""
        assert out is None, "a model makes its own results"
        bind = getattr(self._model, "bind_attention", None)
        if bind is None:
            return self._model(*inputs)
        bind(fill)
        try:
            return self._model(*inputs)
        finally:
            bind(None)


def _gather(indices: tuple[int, ...]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda env: tuple(env[i] for i in indices)


def _fill(value: Any, env: Sequence[Any]) -> Any:
    if isinstance(value, Slot):
        return env[value.index]
    if isinstance(value, list | tuple):
        return type(value)(_fill(v, env) for v in value)
    return value
