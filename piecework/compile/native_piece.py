"""A piece that runs as one call of the CPU's library: its plan, handed over once."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from piecework.compile.base import write_results
from piecework.compile.native_calls import NativeCalls
from piecework.compile.plan import Plan, Result, Shape
from piecework.errors import PieceworkError

NAME = "native"
_MOST_SEEN = 1 << 12


class InputError(PieceworkError):
    """An input of a piece that is none of those for which the piece was made; `position` says which."""

    def __init__(self, position: int, expected: Shape, found: Tensor) -> None:
        self.position = position
        self.expected = expected
        got = f"{str(found.dtype).removeprefix('torch.')} {list(found.shape)}, strides {found.stride()}"
        super().__init__(
            f"input {position} of a piece must be {expected}, strides {expected.strides}; got {got}"
        )


class NativePiece:
    """See the module and CompiledPiece. Threads may run it at once: each has memory of its own.

    The library must be there.
    """

    opaque = True
    compiler = NAME

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.source = str(plan)
        self._calls = NativeCalls(plan.calls, plan.arena)
        self._pack = struct.Struct(f"{len(plan.inputs) + len(plan.outputs)}q").pack
        numbered = list(enumerate(plan.inputs))
        self._moving = [(i, s.dtype, s.strides, s.sizes[1:]) for i, s in numbered if s.moves]
        self._fixed = [i for i, shape in numbered if not shape.moves]
        self._seen: set[tuple[int, ...]] = set()
        self._made = [(shape.sizes[1:], shape.strides, shape.dtype) for shape in plan.outputs]
        self._results = [r.buffer for r in plan.results]
        self._views = any(r.view is not None for r in plan.results)
        made = list(range(len(plan.inputs), len(plan.inputs) + len(plan.outputs)))
        self.direct = self._results == made and not self._views
        """Whether results are written into given outputs at once, which must not overlap inputs then."""

    def __call__(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None = None) -> Sequence[Tensor]:
        """Run; see CompiledPiece. An input of other sizes or another dtype is an InputError."""
        plan = self.plan
        tokens = 0 if plan.tokens is None else inputs[plan.tokens].shape[0]
        for i, dtype, strides, rest in self._moving:
            x = inputs[i]
            if x.dtype is not dtype or x.stride() != strides or x.shape != (tokens, *rest):
                inputs = [suited(x, plan.inputs[j], tokens, j) for j, x in enumerate(inputs)]
                break
        places = [x.data_ptr() for x in inputs]
        fixed = tuple([places[i] for i in self._fixed])
        if fixed not in self._seen:
            self._check(inputs, fixed)
        direct = outputs is not None and self.direct and self._fit(outputs, tokens)
        if outputs is not None and direct:
            made = list(outputs)
        else:  # takes half the time of torch.empty
            made = [
                torch.empty_strided((tokens, *rest), step, dtype=dtype) for rest, step, dtype in self._made
            ]
        places += [x.data_ptr() for x in made]
        self._calls.run(self._pack(*places), tokens)
        tensors = [*inputs, *made]
        results = [tensors[i] for i in self._results]
        if self._views:
            results = [_view(x, r, tokens) for x, r in zip(results, plan.results, strict=True)]
        return results if outputs is None or direct else write_results(results, outputs)

    def _fit(self, outputs: Sequence[Tensor], tokens: int) -> bool:
        """Whether kernels can write into these tensors as into those that a run makes."""
        return all(
            x.shape == (tokens, *rest) and x.stride() == step and x.dtype is dtype
            for x, (rest, step, dtype) in zip(outputs, self._made, strict=True)
        )

    def _check(self, inputs: Sequence[Tensor], places: tuple[int, ...]) -> None:
        """Look at the weights of a layer, once: later calls know them by their addresses."""
        for i in self._fixed:
            shape, x = self.plan.inputs[i], inputs[i]
            if x.dtype != shape.dtype or x.shape != shape.sizes or x.stride() != shape.strides:
                raise InputError(i, shape, x)
        if len(self._seen) >= _MOST_SEEN:
            self._seen.clear()
        self._seen.add(places)


def suited(x: Tensor, shape: Shape, tokens: int, position: int) -> Tensor:
    """Return input number `position` with the strides that kernels were told.

    Sizes and dtype must be right, else it is an InputError.
    """
    if x.dtype != shape.dtype or tuple(x.shape) != shape.at(tokens):
        raise InputError(position, shape, x)
    steps = zip(x.shape, x.stride(), shape.strides, strict=True)
    if all(size == 1 or found == wanted for size, found, wanted in steps):
        return x
    return torch.empty_strided(x.shape, shape.strides, dtype=x.dtype).copy_(x)


def _view(x: Tensor, result: Result, tokens: int) -> Tensor:
    if result.view is None:
        return x
    return x.as_strided(result.view.at(tokens), result.view.strides, x.storage_offset() + result.offset)
