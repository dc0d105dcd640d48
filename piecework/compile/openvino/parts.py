"""Small things that converters are put together from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset15 as opset


def cast(x: Any, kind: Any) -> Any:
    """Return x in another type."""
    return x if x.get_element_type() == kind else opset.convert(x, kind).output(0)


def wide(x: Any) -> Any:
    """Return x in float32."""
    return cast(x, ov.Type.f32)


def scalar(value: float, like: Any) -> Any:
    """Return a number of the type of `like`."""
    return opset.constant(value, like.get_element_type()).output(0)


def ints(values: Sequence[int]) -> Any:
    """Return whole numbers, as shapes and axes are given."""
    return opset.constant(np.array(values, dtype=np.int64)).output(0)


def add(x: Any, y: Any) -> Any:
    """x + y."""
    return opset.add(x, y).output(0)


def multiply(x: Any, y: Any) -> Any:
    """x * y."""
    return opset.multiply(x, y).output(0)


def parts(x: Any, count: int) -> tuple[Any, ...]:
    """Return x in equal parts along its last dimension."""
    return tuple(opset.split(x, opset.constant(rank(x) - 1, ov.Type.i64), count).outputs())


def sections(x: Any, axis: int, sizes: Sequence[int]) -> tuple[Any, ...]:
    """Return x in parts of these sizes along `axis`."""
    return tuple(opset.variadic_split(x, opset.constant(axis, ov.Type.i64), ints(sizes)).outputs())


def join(parts: Sequence[Any], axis: int) -> Any:
    """Concatenate."""
    return opset.concat(list(parts), axis).output(0)


def reshape(x: Any, shape: Sequence[int]) -> Any:
    """Return x with another shape, in which one size may be -1."""
    return opset.reshape(x, ints(shape), False).output(0)


def unsqueeze(x: Any, axis: int) -> Any:
    """Return x with a dimension of size 1 more."""
    return opset.unsqueeze(x, ints([axis])).output(0)


def rank(x: Any) -> int:
    """Return the number of dimensions."""
    return int(x.get_partial_shape().rank.get_length())


def size(x: Any, axis: int) -> int:
    """Return a size that is the same for any number of tokens."""
    return int(x.get_partial_shape()[axis].get_length())


def is_constant(x: Any) -> bool:
    """Whether x is a weight that the model holds."""
    return bool(x.get_node().get_type_name() == "Constant")
