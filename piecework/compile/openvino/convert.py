"""A piece's graph as an OpenVINO model: each node by its op's converter, in order."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import openvino as ov
import torch
from openvino import opset15 as opset
from torch import Tensor, fx

from piecework.compile.openvino.tensors import TYPES, shared
from piecework.graph.passes.arguments import Bound, bind, op_name
from piecework.graph.symbols import expression

C = TypeVar("C", bound=Callable[..., Any])
Converter = Callable[..., Any]
"""converter(*arguments), all of the op's schema in order, gives its result or a tuple, as `ov.Output`s."""
CONVERTERS: dict[str, Converter] = {}
"""By the op's name, such as `piecework::rms_norm`."""

_MAKING = {"aten::empty_like", "aten::empty", "aten::new_empty", "aten::empty_strided"}
_SIZES = {"aten::sym_size"}


class NotConvertedError(Exception):
    """A piece with something that has no converter; the message names it."""


@dataclass(frozen=True)
class Made:
    """A result of a piece: output number `index` of the model."""

    index: int


@dataclass(frozen=True)
class Given:
    """A result that is input number `position` of the piece, as it is."""

    position: int


@dataclass(frozen=True)
class Unwritten:
    """A result that is memory for others to write."""

    value: Tensor


Result = Made | Given | Unwritten


@dataclass(frozen=True)
class Converted:
    """`model` takes the piece's inputs at `parameters`, in this order; `results` say where results are."""

    model: Any
    parameters: tuple[int, ...]
    results: tuple[Result, ...]


def converter(*names: str) -> Callable[[C], C]:
    """Register the converter of these ops."""

    def add(function: C) -> C:
        for name in names:
            CONVERTERS[name] = function
        return function

    return add


def convert(piece: fx.GraphModule, constants: Mapping[int, Tensor], tokens: int | None) -> Converted:
    """Convert a piece.

    Args:
        piece: its placeholders and nodes carry shapes in `meta["val"]`.
        constants: weights by the positions of the inputs that they stand for; the model reads their memory.
        tokens: what the sizes that grow with tokens are; None leaves them open.

    Raises NotConvertedError.
    """
    return _Conversion(constants, tokens).run(piece.graph)


def dims(val: Tensor, tokens: int | None) -> list[int]:
    """Return a shape with `tokens`, or -1, for the number of tokens."""
    found = []
    for size in val.shape:
        expr = expression(size)
        if expr.is_Integer:
            found.append(int(expr))
        elif expr.is_Symbol:
            found.append(-1 if tokens is None else tokens)
        else:
            raise NotConvertedError(f"the size {expr}")
    return found


def _open_dims(val: Tensor) -> list[int]:
    """Return an input's shape with -1 for each size that isn't a number; sums of sizes may come too."""
    return [int(expr) if expr.is_Integer else -1 for expr in map(expression, val.shape)]


class _Conversion:
    def __init__(self, constants: Mapping[int, Tensor], tokens: int | None) -> None:
        self._constants = constants
        self._tokens = tokens
        self._values: dict[fx.Node, Any] = {}
        self._parameters: list[tuple[int, Any]] = []

    def run(self, graph: fx.Graph) -> Converted:
        placeholders = list(graph.find_nodes(op="placeholder"))
        for position, node in enumerate(placeholders):
            self._values[node] = self._input(position, node)
        for node in graph.nodes:
            if node.op == "call_function":
                self._values[node] = self._call(node)
        (output,) = graph.find_nodes(op="output")
        outputs: list[Any] = []
        results: list[Result] = []
        for node in output.args[0]:
            value = self._values[node]
            if node in placeholders:
                results.append(Given(placeholders.index(node)))
            elif isinstance(value, Unwritten):
                results.append(value)
            else:
                results.append(Made(len(outputs)))
                outputs.append(value)
        if not outputs:
            raise NotConvertedError("a piece that computes nothing")
        model = ov.Model(outputs, [parameter for _, parameter in self._parameters])
        return Converted(model, tuple(position for position, _ in self._parameters), tuple(results))

    def _input(self, position: int, node: fx.Node) -> Any:
        val: Tensor = node.meta["val"]
        if val.dtype not in TYPES:
            raise NotConvertedError(f"an input of dtype {str(val.dtype).removeprefix('torch.')}")
        if position in self._constants:
            return ov.op.Constant(shared(self._constants[position].contiguous())).output(0)
        if not node.users:
            return None
        shape = _open_dims(val) if self._tokens is None else dims(val, self._tokens)
        parameter = opset.parameter(shape, TYPES[val.dtype])
        self._parameters.append((position, parameter))
        return parameter.output(0)

    def _call(self, node: fx.Node) -> Any:
        if node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, fx.Node)
            return self._values[source][index]
        if isinstance(node.meta.get("val"), torch.SymInt):
            return node.meta["val"]  # sizes stay open: whoever needs one takes it off its own shape
        name = op_name(node.target)
        if name in _MAKING:
            return Unwritten(node.meta["val"])
        if name not in CONVERTERS:
            raise NotConvertedError(f"{name} has no converter")
        assert isinstance(node.target, torch._ops.OpOverload)
        bound = self._bound(node.target, node)
        try:
            return CONVERTERS[name](*bound.values())
        except NotConvertedError as error:
            raise NotConvertedError(f"{name} ({error})") from error
        except (RuntimeError, TypeError, ValueError) as error:
            raise NotConvertedError(f"{name} ({type(error).__name__}: {error})") from error

    def _bound(self, target: torch._ops.OpOverload, node: fx.Node) -> Bound:
        def value(n: fx.Node) -> Any:
            found = self._values[n]
            if isinstance(found, Unwritten):
                raise NotConvertedError(f"{target._schema.name} reads memory that nobody has written")
            return found

        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), value)
        return bind(target, tuple(args), dict(kwargs))
