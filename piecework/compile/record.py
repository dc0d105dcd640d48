"""Writes down which kernels a function calls on tensors without data, and where their memory lies.

The function runs as it would on real tensors. Between calls of kernels it may make tensors and views of
them; whatever else it does can't be written down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from piecework.compile.arena import Life, lay_out
from piecework.compile.plan import (
    ARENA,
    FIRST,
    MOST_FIELDS,
    NUMBER,
    TOKENS,
    Call,
    Field,
    Plan,
    Result,
    Shape,
    Size,
    double,
)
from piecework.errors import PieceworkError
from piecework.graph.symbols import assumptions, expression
from piecework.ops.cpu.kernels import Kernel

_aten = torch.ops.aten
_MAKING = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
# Questions about a tensor's place in memory, which torch answers through dispatch: no operations.
_QUERIES = {torch.ops.prim.device.default}


class NotNativeError(PieceworkError):
    """A piece that is no list of kernel calls; `reason` says what else there is in it."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


def record(function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], mode: FakeTensorMode) -> Plan:
    """Run `function` on `inputs`, tensors of `mode` with one symbolic size at most, and write it down.

    Raises NotNativeError.
    """
    recorder = _Recorder(inputs)
    with mode, recorder.operations, recorder.addresses:
        results = function(*inputs)
    if failed := assumptions(mode):
        raise NotNativeError("it assumes of the number of tokens: " + "; ".join(failed))
    return recorder.finish(results)


class _Address:
    """Where the data of a tensor begins; a kernel that gets one is written down instead of called."""

    def __init__(self, recorder: _Recorder, storage: int, offset: Size) -> None:
        self._recorder = recorder
        self.storage = storage
        self.offset = offset

    def record(self, kernel: Kernel, fields: tuple[Any, ...]) -> None:
        self._recorder.call(kernel, fields)


class _Recorder:
    """Memory is numbered as it is met: inputs first, then what the function makes."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self.operations = _Operations()
        self.addresses = _Addresses(self)
        self._inputs = inputs
        self._tokens: int | None = None
        self._symbol: sympy.Symbol | None = None
        self._storages: dict[int, int] = {}
        self._alive: list[Any] = []  # so that the ids of storages stay their own
        self._bytes: list[Size] = []
        self._calls: list[tuple[Kernel, list[tuple[int | None, Size]]]] = []
        for i, x in enumerate(inputs):
            for size in x.shape[:1]:
                self._find_symbol(i, expression(size))
        for x in inputs:
            self.storage(x)

    def _find_symbol(self, position: int, size: sympy.Expr) -> None:
        if size.is_Symbol and self._symbol is None:
            self._symbol, self._tokens = size, position

    def size(self, value: Any) -> Size:
        """Return a size as a function of the number of tokens."""
        expr = sympy.expand(expression(value))
        if isinstance(expr, sympy.Integer):
            return Size(0, int(expr))
        per_token = expr.coeff(self._symbol, 1) if self._symbol is not None else expr
        rest = sympy.expand(expr - per_token * self._symbol) if self._symbol is not None else expr
        if not (per_token.is_Integer and rest.is_Integer):
            raise NotNativeError(f"the size {expr} does not grow evenly with the number of tokens")
        return Size(int(per_token), int(rest))

    def storage(self, x: Tensor) -> int:
        """Return the number of the memory that holds x."""
        memory = x.untyped_storage()
        number = self._storages.setdefault(memory._cdata, len(self._storages))
        if number == len(self._bytes):
            self._alive.append(memory)
            self._bytes.append(self.size(memory.nbytes()))
        return number

    def address(self, x: Tensor) -> _Address:
        """Return where x begins."""
        return _Address(self, self.storage(x), self.size(x.storage_offset() * x.itemsize))

    def call(self, kernel: Kernel, fields: tuple[Any, ...]) -> None:
        """Write down a call."""
        if len(fields) != len(kernel.fields) or len(fields) > MOST_FIELDS:
            raise NotNativeError(f"{kernel.name} is called with {len(fields)} fields")
        floats = len(fields) - len(kernel.floats)
        found: list[tuple[int | None, Size]] = []
        for i, value in enumerate(fields):
            if isinstance(value, _Address):
                found.append((value.storage, value.offset))
            elif i >= floats:
                found.append((None, double(value).offset))
            else:
                found.append((None, self.size(value)))
        self._calls.append((kernel, found))

    def finish(self, results: Sequence[Tensor]) -> Plan:
        """Return everything that was written down, with places for the memory between calls."""
        inputs = len(self._inputs)
        kept: list[int] = list(range(inputs))
        for x in results:
            if (number := self.storage(x)) not in kept:
                kept.append(number)
        buffers = {number: Field(FIRST + i, Size(0, 0)) for i, number in enumerate(kept)}
        between, lives = [], []
        for number in range(inputs, len(self._bytes)):
            uses = [i for i, (_, fields) in enumerate(self._calls) if any(s == number for s, _ in fields)]
            if number not in buffers and uses:
                between.append(number)
                lives.append(Life(self._bytes[number], uses[0], uses[-1]))
        starts, arena = lay_out(lives)
        for number, start in zip(between, starts, strict=True):
            buffers[number] = Field(ARENA, start)
        calls = tuple(
            Call(kernel.name, tuple(_field(buffers, storage, offset) for storage, offset in fields))
            for kernel, fields in self._calls
        )
        made = [self._whole(number, results) for number in kept[inputs:]]
        shapes = [self.shape(x) for x in self._inputs] + made
        found = tuple(self._result(x, kept.index(self.storage(x)), shapes) for x in results)
        return Plan(tuple(shapes[:inputs]), tuple(made), calls, found, arena, self._tokens)

    def shape(self, x: Tensor) -> Shape:
        """Return the shape of x."""
        sizes, strides = ([self.size(s) for s in of] for of in (x.shape, x.stride()))
        plain = [s.constant for s in sizes]
        moves = sizes[:1] == [Size(1, 0)]
        if moves:
            plain[0] = TOKENS
        if any(s.per_token for s in (*sizes[int(moves) :], *strides)):
            raise NotNativeError(f"a tensor of sizes {tuple(x.shape)} and strides {x.stride()}")
        return Shape(tuple(plain), tuple(s.constant for s in strides), x.dtype)

    def _whole(self, number: int, results: Sequence[Tensor]) -> Shape:
        """A tensor that fills the memory `number`: a result where one does, else rows of its dtype."""
        parts = [x for x in results if self.storage(x) == number]
        per_token, constant = self._bytes[number]
        if constant or not per_token:
            raise NotNativeError("a result that does not grow evenly with the number of tokens")
        for x in parts:
            if x.is_contiguous() and self.size(x.numel() * x.itemsize) == (per_token, constant):
                return self.shape(x)
        width = per_token // parts[0].itemsize
        return Shape((TOKENS, width), (width, 1), parts[0].dtype)

    def _result(self, x: Tensor, buffer: int, shapes: Sequence[Shape]) -> Result:
        shape, offset = self.shape(x), self.size(x.storage_offset())
        if shape == shapes[buffer] and offset == (0, 0):
            return Result(buffer)
        if shape.dtype != shapes[buffer].dtype or offset.per_token:
            raise NotNativeError("a result that is some other part of a tensor")
        return Result(buffer, shape, offset.constant)


def _field(buffers: dict[int, Field], storage: int | None, offset: Size) -> Field:
    if storage is None:
        return Field(NUMBER, offset)
    start = buffers[storage]
    return Field(start.buffer, start.offset.plus(offset))


class _Operations(TorchDispatchMode):
    """Lets operations pass that compute nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _MAKING and func not in _QUERIES and not _is_view(func):
            raise NotNativeError(f"{func} is no call of a kernel")
        return func(*args, **(kwargs or {}))


def _is_view(func: Any) -> bool:
    """Whether all that `func` returns is memory that it was given, and it writes none."""
    schema = func._schema
    aliases = [r.alias_info for r in schema.returns]
    return not schema.is_mutable and bool(aliases) and all(alias is not None for alias in aliases)


class _Addresses(TorchFunctionMode):
    """Answers what tensors without data can't: where they are."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.data_ptr:
            return self._recorder.address(args[0])
        return func(*args, **(kwargs or {}))
