"""Links the plans of a program's pieces, and attention between them, into one list of kernel calls.

Nothing is computed and no weight is read: buffers get other numbers, and what crosses from one piece to the
next gets its place in the memory between calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from piecework.compile.arena import Life, lay_out
from piecework.compile.native_piece import NativePiece
from piecework.compile.plan import ARENA, FIRST, NUMBER, Call, Field, Result, Shape, Size, double
from piecework.errors import PieceworkError
from piecework.graph.program import ATTENTION, HoleCall, PieceCall, Program, Slot
from piecework.native.types import TYPES
from piecework.ops.attention import paged_attention
from piecework.ops.attention_int8 import SCALE_DTYPE, paged_attention_int8
from piecework.ops.cpu.attention import paged_attention_cpu, paged_attention_int8_cpu, supports
from piecework.ops.cpu.kernels import KERNELS

KERNEL = "paged_attention"
STEP = ("slots", "page_table", "query_starts", "context_lengths", "sequences", "table_stride")
"""Fields of the kernel that each step has its own values for: four addresses, two numbers."""
_START = Size(0, 0)


class NotChainedError(PieceworkError):
    """A program that can't run as one call; `reason` says why."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


@dataclass(frozen=True)
class Cache:
    """What the calls take keys and values of a layer to be: [pages, heads, page_size, dim] of dtype; those of
    int8 have scales [pages, heads, page_size].
    """

    layer: int
    heads: int
    dim: int
    dtype: torch.dtype


@dataclass(frozen=True)
class ChainPlan:
    """A program as calls.

    Buffers are, in this order: the inputs, the result, STEP, the weights, the page size, and keys, values and
    scales of each of `caches`. Those of STEP that are numbers and the page size stand there themselves.

    Attributes:
        inputs: what the program's inputs must look like; None for one that no piece looks at.
        result: the tensor that a run makes.
        weights: in the order of the program's bindings.
        calls, arena: as in Plan. tokens: the first input that has the number of tokens.
    """

    inputs: tuple[Shape | None, ...]
    result: Shape
    weights: tuple[Tensor, ...]
    caches: tuple[Cache, ...]
    calls: tuple[Call, ...]
    arena: Size
    tokens: int


def link_chain(program: Program, cache_dtype: torch.dtype | None = None) -> ChainPlan:
    """Link a program whose pieces are all native and whose holes are attention; else NotChainedError.

    `cache_dtype` is that of the KV cache, None where it is attention's own.
    """
    if program.opaque_reason is not None:
        raise NotChainedError(program.opaque_reason)
    if program.token_input is None:
        raise NotChainedError("none of its inputs has the number of tokens")
    linker = _Linker(program, program.token_input, cache_dtype)
    for step in program.steps:
        if isinstance(step, PieceCall):
            linker.piece(step)
        else:
            linker.hole(step)
    return linker.finish()


class _Where(NamedTuple):
    """So many bytes behind the start of memory number `memory`; None: a plain number."""

    memory: int | None
    offset: Size = _START

    def behind(self, offset: Size) -> _Where:
        """Return the place so many bytes further."""
        return _Where(self.memory, self.offset.plus(offset))


@dataclass(frozen=True)
class _Place:
    """Where a tensor is, and its shape; that of an input is known when a piece has taken it."""

    where: _Where
    shape: Shape | None

    def part(self, result: Result) -> _Place:
        """Return the place of a piece's result, which is in this tensor."""
        if result.view is None:
            return self
        return _Place(self.where.behind(Size(0, result.offset * result.view.dtype.itemsize)), result.view)


class _Linker:
    """Memory is numbered as it is met; that of a buffer has its field from the start."""

    def __init__(self, program: Program, tokens: int, cache_dtype: torch.dtype | None) -> None:
        self._program = program
        self._cache_dtype = cache_dtype
        self._tokens = tokens
        self._sizes: list[Size] = []
        self._fields: dict[int, Field] = {}
        self._calls: list[tuple[str, list[_Where]]] = []
        self._caches: dict[Cache, tuple[_Where, ...]] = {}
        self._places = {slot: _Place(self._buffer(), None) for slot in program.input_slots}
        self._result = self._buffer()
        self._step = {name: self._buffer() for name in STEP}
        self._weights: list[Tensor] = []
        for slot, binding in enumerate(program.bindings):
            if binding.tensor is not None:
                self._weights.append(binding.tensor)
                self._places[slot] = _Place(self._buffer(), shape_of(binding.tensor))
        self._step["page_size"] = self._buffer()

    def piece(self, step: PieceCall) -> None:
        """Add the calls of a piece."""
        piece = self._program.pieces[step.distinct]
        if not isinstance(piece, NativePiece):
            raise NotChainedError(f"a piece is run by the compiler {piece.compiler}")
        plan = piece.plan
        places = [self._taken(slot, shape) for slot, shape in zip(step.inputs, plan.inputs, strict=True)]
        places += [_Place(self._memory(_bytes(shape)), shape) for shape in plan.outputs]
        starts = [_Where(None), self._memory(plan.arena), *(place.where for place in places)]
        assert (NUMBER, ARENA, FIRST) == (0, 1, 2)
        for call in plan.calls:
            self._calls.append(
                (call.kernel, [starts[buffer].behind(offset) for buffer, offset in call.fields])
            )
        for slot, result in zip(step.outputs, plan.results, strict=True):
            self._places[slot] = places[result.buffer].part(result)

    def hole(self, step: HoleCall) -> None:
        """Add the call of attention over pages."""
        if step.op != ATTENTION:
            raise NotChainedError(f"{step.op} stands between pieces, and no kernel fills it")
        op: Any = step.function
        names = [argument.name for argument in op._schema.arguments]
        named: dict[str, Any] = {**dict(zip(names, step.args, strict=False)), **step.kwargs}
        values: dict[str, _Where] = dict(self._step)
        shapes: dict[str, Shape] = {}
        for name in ("q", "k", "v", "out"):
            value = named[name]
            place = self._places.get(value.index) if isinstance(value, Slot) else None
            if place is None or place.shape is None or len(place.shape.sizes) != 3:
                raise NotChainedError(f"attention's {name} is no result of a piece")
            shapes[name], values[name] = place.shape, place.where
            values[f"{name}_stride"] = _number(place.shape.strides[0])
        (_, heads, dim), (_, kv_heads, _) = shapes["q"].sizes, shapes["k"].sizes
        cache = Cache(named["layer"], kv_heads, dim, self._cache_dtype or shapes["q"].dtype)
        self._check(shapes, cache)
        if cache not in self._caches:
            self._caches[cache] = tuple(self._buffer() for _ in range(4 if cache.dtype is torch.int8 else 2))
        own = (*self._caches[cache], _number(0), _number(0))
        values["k_cache"], values["v_cache"], values["k_scales"], values["v_scales"] = own[:4]
        values |= {"heads": _number(heads), "kv_heads": _number(kv_heads), "head_dim": _number(dim)}
        values |= {"window": _number(named["window"]), "type": _number(TYPES[shapes["q"].dtype])}
        values["cache_type"] = _number(TYPES[cache.dtype])
        values |= {"rows": _Where(None, Size(1, 0)), "scale": _Where(None, double(named["scale"]).offset)}
        self._calls.append((KERNEL, [values[name] for name in KERNELS[KERNEL].fields]))

    def finish(self) -> ChainPlan:
        """Give what lies between calls its place."""
        program = self._program
        place = self._places[program.output_slots[0]]
        memory, shape = place.where.memory, place.shape
        if not program.single or memory in self._fields or memory is None or shape is None:
            raise NotChainedError("its result is not one tensor that a piece makes")
        if place.where.offset != _START or _bytes(shape) != self._sizes[memory]:
            raise NotChainedError("its result is a part of a tensor")
        self._fields[memory] = self._field(self._result)
        lives: dict[int, Life] = {}
        for index, (_, found) in enumerate(self._calls):
            for number, _ in found:
                if number is not None and number not in self._fields:
                    first = lives[number].first if number in lives else index
                    lives[number] = Life(self._sizes[number], first, index)
        starts, arena = lay_out(list(lives.values()))
        self._fields |= {n: Field(ARENA, start) for n, start in zip(lives, starts, strict=True)}
        calls = tuple(Call(kernel, tuple(map(self._field, found))) for kernel, found in self._calls)
        inputs = tuple(self._places[slot].shape for slot in program.input_slots)
        weights, caches = tuple(self._weights), tuple(self._caches)
        return ChainPlan(inputs, shape, weights, caches, calls, arena, self._tokens)

    def _memory(self, size: Size) -> _Where:
        self._sizes.append(size)
        return _Where(len(self._sizes) - 1)

    def _buffer(self) -> _Where:
        where = self._memory(_START)
        self._fields[len(self._sizes) - 1] = Field(FIRST + len(self._fields), _START)
        return where

    def _field(self, where: _Where) -> Field:
        if where.memory is None:
            return Field(NUMBER, where.offset)
        buffer, start = self._fields[where.memory]
        return Field(buffer, start.plus(where.offset))

    def _taken(self, slot: int, shape: Shape) -> _Place:
        """The place of a piece's input, which has the shape that the piece takes."""
        place = self._places[slot]
        if place.shape is None:
            place = self._places[slot] = _Place(place.where, shape)
        if place.shape != shape:
            raise NotChainedError(f"a piece takes {shape}, strides {shape.strides}, where {place.shape} is")
        return place

    def _check(self, shapes: dict[str, Shape], cache: Cache) -> None:
        """Ask whether the kernel is what fills the hole on the device, of tensors without data."""
        tensors = [
            torch.empty_strided(s.at(1), s.strides, dtype=s.dtype, device="meta") for s in shapes.values()
        ]
        pages = torch.empty((1, cache.heads, 1, cache.dim), dtype=cache.dtype, device="meta")
        tensors += [pages, pages]
        op, kernel = paged_attention, paged_attention_cpu
        if cache.dtype is torch.int8:
            scales = torch.empty((1, cache.heads, 1), dtype=SCALE_DTYPE, device="meta")
            tensors += [scales, scales]
            op, kernel = paged_attention_int8, paged_attention_int8_cpu
        first = op.candidates(self._program.device.op_order)[0]
        if first.run is not kernel or not supports(*tensors):
            raise NotChainedError("the kernel can't run its attention")


def shape_of(x: Tensor) -> Shape:
    """Return the shape of a tensor that doesn't depend on the number of tokens."""
    return Shape(tuple(x.shape), x.stride(), x.dtype)


def _number(value: int) -> _Where:
    return _Where(None, Size(0, value))


def _bytes(shape: Shape) -> Size:
    """How much a tensor without gaps takes."""
    row = shape.dtype.itemsize
    for size in shape.sizes[1:] if shape.moves else shape.sizes:
        row *= size
    return Size(row, 0) if shape.moves else Size(0, row)
