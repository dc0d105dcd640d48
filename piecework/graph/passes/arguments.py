"""The arguments of a node by the names of its op's schema, so that spelling makes no difference."""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Node

_DIMS = frozenset({"dim", "dim0", "dim1", "dims", "start_dim", "end_dim"})
_ADDS_A_DIM = frozenset({"unsqueeze", "stack"})

Bound = dict[str, Any]
"""An argument's value by its name, defaults filled in, in the schema's order."""


def op_name(target: Any) -> str:
    """The name of what a node calls: `piecework::rms_norm`, `aten::view`, `getitem`.

    Overloads of one op share a name.
    """
    if isinstance(target, OpOverload):
        return target._schema.name
    if isinstance(target, HigherOrderOperator):
        return f"higher_order::{target.name()}"
    return getattr(target, "__name__", str(target))


def is_getitem(node: Node) -> bool:
    """Whether the node takes one result of an op with several."""
    return node.op == "call_function" and node.target is operator.getitem


def bind(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bound:
    """Name the arguments of a call. A TypeError says that the call does not fit the schema."""
    schema = target._schema.arguments
    positional = [a for a in schema if not a.kwarg_only]
    if len(args) > len(positional):
        raise TypeError(f"{target}: {len(args)} positional arguments, at most {len(positional)}")
    given = {a.name: value for a, value in zip(positional, args, strict=False)}
    known = {a.name for a in schema}
    for name, value in kwargs.items():
        if name not in known or name in given:
            raise TypeError(f"{target}: argument {name} is unknown or given twice")
        given[name] = value
    bound: Bound = {}
    for argument in schema:
        if argument.name in given:
            bound[argument.name] = _normal(given[argument.name], str(argument.type))
        elif argument.has_default_value():
            bound[argument.name] = _normal(argument.default_value, str(argument.type))
        else:
            raise TypeError(f"{target}: argument {argument.name} is missing")
    return bound


def spell(target: OpOverload, bound: Bound) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The one way to write a call down: positional where possible, without trailing defaults."""
    args: list[Any] = []
    needed = 0
    kwargs: dict[str, Any] = {}
    for argument in target._schema.arguments:
        value = bound[argument.name]
        default = argument.has_default_value() and same_literal(
            value, _normal(argument.default_value, str(argument.type))
        )
        if argument.kwarg_only:
            if not default:
                kwargs[argument.name] = value
            continue
        args.append(value)
        if not default:
            needed = len(args)
    return tuple(args[:needed]), kwargs


def _normal(value: Any, kind: str) -> Any:
    if isinstance(value, tuple | list):
        return [_normal(v, "float" if "List[float]" in kind else "") for v in value]
    if "List[int]" in kind and isinstance(value, int) and not isinstance(value, bool):
        return [value]
    if kind in ("float", "Optional[float]") and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def same_literal(a: Any, b: Any) -> bool:
    """Whether two literals are one value: 1, 1.0 and True are three."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(same_literal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, Node) or isinstance(b, Node):
        return a is b
    if type(a) is not type(b):
        return False
    return bool(a == b) or (a != a and b != b)


def is_dim(name: str) -> bool:
    """Whether an argument of this name counts dimensions, so that -1 is the last."""
    return name in _DIMS


def rank(target: OpOverload, bound: Bound) -> int | None:
    """What a negative dimension of this call is counted from; None where that is not known."""
    first = next(iter(bound.values()), None)
    if isinstance(first, list) and first:
        first = first[0]
    value = first.meta.get("val") if isinstance(first, Node) else None
    if not isinstance(value, Tensor):
        return None
    extra = 1 if target._schema.name.removeprefix("aten::") in _ADDS_A_DIM else 0
    return value.ndim + extra


def positive_dim(dim: Any, rank: int | None) -> Any:
    """Count a dimension, or a list of them, from the front; anything else stays."""
    if isinstance(dim, list | tuple):
        return [positive_dim(d, rank) for d in dim]
    if rank and isinstance(dim, int) and not isinstance(dim, bool) and dim < 0:
        return dim + rank
    return dim


def positive_dims(target: OpOverload, bound: Bound) -> Bound:
    """The same arguments with every dimension counted from the front."""
    if not any(is_dim(name) for name in bound):
        return bound
    count = rank(target, bound)
    return {name: positive_dim(v, count) if is_dim(name) else v for name, v in bound.items()}
