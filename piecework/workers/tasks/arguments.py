"""What a task is called with: values by name, which get their tags from the function's declaration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from piecework.workers.endpoint import Scalar
from piecework.workers.tasks.deferred import Deferred
from piecework.workers.tasks.functions import Function
from piecework.workers.tasks.handles import Handle, HandleError
from piecework.workers.tasks.tags import Parameter, Tag


@dataclass(frozen=True)
class Allocate:
    """A tensor that the runtime allocates for an OUTPUT parameter; it lives as long as its scope."""

    shape: tuple[int, ...]
    dtype: torch.dtype


Value = Scalar | Handle | Deferred | Allocate
_SCALARS = (bool, int, float, str, bytes)


class TaskArgs:
    """A task's arguments by name. `values` are for names that Python doesn't take as keywords."""

    def __init__(self, values: Mapping[str, Value] | None = None, /, **named: Value) -> None:
        self.values: dict[str, Value] = {**(values or {}), **named}

    def bind(self, function: Function) -> list[tuple[Parameter, Value]]:
        """Return the values in the order of the function's parameters.

        Raises HandleError for a name that is missing or unknown, or a value of another kind than declared.
        """
        known = [parameter.name for parameter in function.parameters]
        for name, value in self.values.items():
            if name not in known:
                raise HandleError(name, value, f"a parameter of {function.name}: {', '.join(known)}")
        bound = []
        for parameter in function.parameters:
            if parameter.name not in self.values:
                raise HandleError(parameter.name, None, f"given: {function.name} takes it")
            value = self.values[parameter.name]
            _check(parameter, value)
            bound.append((parameter, value))
        return bound


def _check(parameter: Parameter, value: Any) -> None:
    if parameter.tag is None:
        fits, allowed = isinstance(value, _SCALARS), "a number, a bool, text or bytes"
    elif parameter.tag is Tag.OUTPUT:
        fits, allowed = isinstance(value, Allocate), "an Allocate, since the runtime makes it"
    else:
        fits, allowed = isinstance(value, Handle | Deferred), "a handle, or a tensor after `defer`"
    if not fits:
        shown = type(value).__name__ if isinstance(value, torch.Tensor) else value
        raise HandleError(parameter.name, shown, allowed)
