"""A piece as a list of kernel calls: what a native piece runs, as plain values that can be kept and read."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from piecework.ops.cpu.kernels import KERNELS

NUMBER, ARENA, FIRST = 0, 1, 2
"""Where a field begins: nowhere, in the memory between calls, in buffer FIRST + i (inputs, then outputs)."""
MOST_FIELDS = 32  # as in native/src/run.h
TOKENS = -1


class Size(NamedTuple):
    """per_token * T + constant, with T tokens."""

    per_token: int
    constant: int

    def at(self, tokens: int) -> int:
        """Return the size for so many tokens."""
        return self.per_token * tokens + self.constant

    def plus(self, other: Size) -> Size:
        """Return the sum."""
        return Size(self.per_token + other.per_token, self.constant + other.constant)

    def __str__(self) -> str:
        if not self.per_token:
            return str(self.constant)
        times = "T" if self.per_token == 1 else f"{self.per_token}*T"
        return times + (f"{self.constant:+}" if self.constant else "")


class Field(NamedTuple):
    """A number, or an address: so many bytes behind the start of a buffer."""

    buffer: int
    offset: Size


@dataclass(frozen=True)
class Call:
    """A call of the kernel of this name. Doubles among its fields are plain numbers with their bits."""

    kernel: str
    fields: tuple[Field, ...]


@dataclass(frozen=True)
class Shape:
    """Sizes, strides in elements, and dtype of a tensor. The first size may be TOKENS, their number."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def moves(self) -> bool:
        """Whether it depends on the number of tokens."""
        return self.sizes[:1] == (TOKENS,)

    def at(self, tokens: int) -> tuple[int, ...]:
        """Return the sizes at so many tokens."""
        return (tokens, *self.sizes[1:]) if self.moves else self.sizes

    def __str__(self) -> str:
        sizes = ("T" if size == TOKENS else str(size) for size in self.sizes)
        return f"{str(self.dtype).removeprefix('torch.')} [{', '.join(sizes)}]"


@dataclass(frozen=True)
class Result:
    """Input or output number `buffer` itself, or the view that begins `offset` elements behind its start."""

    buffer: int
    view: Shape | None = None
    offset: int = 0


@dataclass(frozen=True)
class Plan:
    """A piece.

    Attributes:
        inputs: what the inputs must look like.
        outputs: tensors that a run makes; contiguous, and each has the tokens as its first dimension.
        calls: in order. results: of the piece, each an input or an output or a part of one.
        arena: bytes of the memory between calls.
        tokens: the first input that has the number of tokens; None if nothing depends on it.
    """

    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    calls: tuple[Call, ...]
    results: tuple[Result, ...]
    arena: Size
    tokens: int | None

    def __str__(self) -> str:
        """A line for each call; `i` are inputs, `o` outputs, and @ is memory between calls."""
        names = [f"i{i}" for i in range(len(self.inputs))] + [f"o{i}" for i in range(len(self.outputs))]
        made = (f"{names[len(self.inputs) + i]} = {shape}" for i, shape in enumerate(self.outputs))
        calls = (_describe(call, names) for call in self.calls)
        results = ", ".join(_describe_result(result, names) for result in self.results)
        return "\n".join([f"inputs: {len(self.inputs)}", *made, *calls, f"results: {results}"]) + "\n"


def double(value: float) -> Field:
    """Return a field with the bits of a double."""
    return Field(NUMBER, Size(0, struct.unpack("q", struct.pack("d", value))[0]))


def _describe(call: Call, names: Sequence[str]) -> str:
    kernel = KERNELS[call.kernel]
    floats = len(call.fields) - len(kernel.floats)
    words = []
    for i, (name, field) in enumerate(zip(kernel.fields, call.fields, strict=True)):
        text = str(field.offset)
        if i < len(kernel.pointers):
            if field.buffer == NUMBER:
                continue  # not there
            start = "@" if field.buffer == ARENA else names[field.buffer - FIRST]
            text = start + (f"[{text}]" if text != "0" or start == "@" else "")
        elif i >= floats:
            text = f"{struct.unpack('d', struct.pack('q', field.offset.constant))[0]:g}"
        words.append(f"{name}={text}")
    return f"{call.kernel}({', '.join(words)})"


def _describe_result(result: Result, names: Sequence[str]) -> str:
    name = names[result.buffer]
    return name if result.view is None else f"{name}[{result.offset}:] as {result.view}"


def spell_plan(plan: Plan) -> dict[str, Any]:
    """Return what JSON can hold of a plan, for `read_plan`."""
    return {
        "inputs": [_spell_shape(shape) for shape in plan.inputs],
        "outputs": [_spell_shape(shape) for shape in plan.outputs],
        "calls": [[call.kernel, [[f.buffer, *f.offset] for f in call.fields]] for call in plan.calls],
        "results": [[r.buffer, r.view and _spell_shape(r.view), r.offset] for r in plan.results],
        "arena": plan.arena,
        "tokens": plan.tokens,
    }


def read_plan(spelled: dict[str, Any]) -> Plan:
    """Return the plan that `spell_plan` wrote down; ValueError, LookupError or TypeError if it is none.

    Every kernel must be there and have as many fields, and every buffer be one of the plan's.
    """
    inputs = tuple(_read_shape(shape) for shape in spelled["inputs"])
    outputs = tuple(_read_shape(shape) for shape in spelled["outputs"])
    most = len(inputs) + len(outputs)
    calls = tuple(_read_call(name, fields, FIRST + most) for name, fields in spelled["calls"])
    results = tuple(Result(b, view and _read_shape(view), offset) for b, view, offset in spelled["results"])
    tokens = spelled["tokens"]
    if not all(0 <= result.buffer < most for result in results) or not 0 <= (tokens or 0) < most:
        raise ValueError("a result or an input that the plan does not have")
    return Plan(inputs, outputs, calls, results, Size(*spelled["arena"]), tokens)


def _read_call(name: str, fields: Sequence[Sequence[int]], most: int) -> Call:
    read = tuple(Field(buffer, Size(per_token, constant)) for buffer, per_token, constant in fields)
    if len(read) != len(KERNELS[name].fields) or not all(0 <= field.buffer < most for field in read):
        raise ValueError(f"a call of {name} with fields that it does not have")
    return Call(name, read)


def _spell_shape(shape: Shape) -> list[Any]:
    return [shape.sizes, shape.strides, str(shape.dtype).removeprefix("torch.")]


def _read_shape(spelled: Sequence[Any]) -> Shape:
    sizes, strides, name = spelled
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return Shape(tuple(sizes), tuple(strides), dtype)
