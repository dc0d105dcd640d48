"""Converters of torch's operations that stand between named ops, and of some that foreign models bring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import openvino as ov
from openvino import opset15 as opset

from piecework.compile.openvino.convert import NotConvertedError, converter
from piecework.compile.openvino.parts import cast, ints, join, multiply, rank, reshape, scalar, sections
from piecework.compile.openvino.parts import unsqueeze as add_dim
from piecework.compile.openvino.tensors import TYPES


def _like(x: Any, y: Any) -> Any:
    """y beside x: a number gets x's type, a tensor must have it."""
    if isinstance(y, bool | int | float):
        return scalar(y, x)
    if x.get_element_type() != y.get_element_type():
        raise NotConvertedError(f"operands of types {x.get_element_type()} and {y.get_element_type()}")
    return y


def _axis(x: Any, dim: int, extra: int = 0) -> int:
    return dim % (rank(x) + extra)


@converter("aten::add")
def _add(x: Any, y: Any, alpha: Any = 1) -> Any:
    y = _like(x, y)
    return opset.add(x, y if alpha == 1 else multiply(y, scalar(alpha, y))).output(0)


@converter("aten::sub")
def _sub(x: Any, y: Any, alpha: Any = 1) -> Any:
    y = _like(x, y)
    return opset.subtract(x, y if alpha == 1 else multiply(y, scalar(alpha, y))).output(0)


@converter("aten::mul")
def _mul(x: Any, y: Any) -> Any:
    return multiply(x, _like(x, y))


@converter("aten::div")
def _div(x: Any, y: Any) -> Any:
    if not x.get_element_type().is_real():
        raise NotConvertedError("a division of whole numbers")
    return opset.divide(x, _like(x, y)).output(0)


@converter("aten::view", "aten::reshape", "aten::_unsafe_view")
def _view(x: Any, size: Sequence[Any]) -> Any:
    shape = [s if isinstance(s, int) else -1 for s in size]
    if shape.count(-1) > 1:
        raise NotConvertedError("two sizes that grow with tokens")
    return reshape(x, shape)


@converter("aten::split_with_sizes")
def _split_with_sizes(x: Any, sizes: Sequence[int], dim: int = 0) -> tuple[Any, ...]:
    return sections(x, _axis(x, dim), sizes)


@converter("aten::slice")
def _slice(x: Any, dim: int, start: int | None, end: int | None, step: int) -> Any:
    limits = (start or 0, 2**31 - 1 if end is None else min(end, 2**31 - 1), step)
    if not all(isinstance(value, int) for value in limits):
        raise NotConvertedError("a slice that ends where tokens do")
    first, last, by = (ints([value]) for value in limits)
    return opset.slice(x, first, last, by, ints([_axis(x, dim)])).output(0)


@converter("aten::cat")
def _cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    return join(tensors, _axis(tensors[0], dim))


@converter("aten::unsqueeze")
def _unsqueeze(x: Any, dim: int) -> Any:
    return add_dim(x, _axis(x, dim, 1))


@converter("aten::squeeze")
def _squeeze(x: Any, dim: Any) -> Any:
    axes = [dim] if isinstance(dim, int) else list(dim)
    return opset.squeeze(x, ints([_axis(x, a) for a in axes])).output(0)


@converter("aten::transpose")
def _transpose(x: Any, dim0: int, dim1: int) -> Any:
    order = list(range(rank(x)))
    a, b = _axis(x, dim0), _axis(x, dim1)
    order[a], order[b] = order[b], order[a]
    return opset.transpose(x, ints(order)).output(0)


@converter("aten::permute")
def _permute(x: Any, dims: Sequence[int]) -> Any:
    return opset.transpose(x, ints([_axis(x, d) for d in dims])).output(0)


@converter("aten::clone", "aten::contiguous", "aten::alias", "aten::detach")
def _same(x: Any, *_: Any) -> Any:
    return x


@converter("aten::_to_copy")
def _to_copy(x: Any, dtype: Any, *_: Any) -> Any:
    return x if dtype is None else cast(x, TYPES[dtype])


@converter("aten::silu")
def _silu(x: Any) -> Any:
    return opset.swish(x, scalar(1.0, x)).output(0)


@converter("aten::sigmoid")
def _sigmoid(x: Any) -> Any:
    return opset.sigmoid(x).output(0)


@converter("aten::relu")
def _relu(x: Any) -> Any:
    return opset.relu(x).output(0)


@converter("aten::gelu")
def _gelu(x: Any, approximate: str = "none") -> Any:
    return opset.gelu(x, "tanh" if approximate == "tanh" else "erf").output(0)


@converter("aten::linear")
def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    y = opset.matmul(x, weight, False, True).output(0)
    return y if bias is None else opset.add(y, bias).output(0)


@converter("aten::mm", "aten::matmul", "aten::bmm")
def _matmul(x: Any, y: Any) -> Any:
    return opset.matmul(x, y, False, False).output(0)


@converter("aten::embedding")
def _embedding(weight: Any, ids: Any, *_: Any) -> Any:
    return opset.gather(weight, ids, opset.constant(0, ov.Type.i64)).output(0)


@converter("aten::_softmax", "aten::softmax")
def _softmax(x: Any, dim: int, *_: Any) -> Any:
    return opset.softmax(x, _axis(x, dim)).output(0)
