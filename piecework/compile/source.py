"""Pieces that are Python text, and the names in it: they can be kept on disk and made without a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from piecework import ops
from piecework.compile.base import FunctionPiece

_TORCH_VALUES = (torch.dtype, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class ByCall:
    """A named op whose implementation depends on the number of tokens, and so is chosen at each call."""

    op: str
    order: tuple[str, ...]

    def __call__(self, *args: Any) -> Any:
        """Run the first implementation in the order that supports this call."""
        return ops.get(self.op).resolve(self.order, *args).run(*args)


class SourcePiece(FunctionPiece):
    """A piece whose `source` defines the function `piece`; `constants` are the other names in it."""

    __slots__ = ("constants",)

    def __init__(self, source: str, constants: Mapping[str, Any], compiler: str) -> None:
        self.constants = dict(constants)
        super().__init__(make_function(source, constants), compiler, source, opaque=False)


def make_function(source: str, constants: Mapping[str, Any]) -> Callable[..., Sequence[Tensor]]:
    """Run the text of a piece and return the function that it defines."""
    namespace = dict(constants)
    exec(compile(source, "<piece>", "exec"), namespace)
    function: Callable[..., Sequence[Tensor]] = namespace["piece"]
    return function


def spell(value: Any) -> list[Any] | None:
    """Return what JSON can hold of a constant, for `read`; None for one that can't be written down."""
    if isinstance(value, ByCall):
        return ["by call", value.op, list(value.order)]
    if isinstance(value, _TORCH_VALUES):
        return ["torch", str(value).removeprefix("torch.")]
    if isinstance(value, torch.device):
        return ["device", str(value)]
    if isinstance(value, float):
        return ["float", repr(value)]
    if isinstance(value, torch._ops.OpOverload):
        return ["op", str(value)]
    for name in ops.names():
        for way in ops.get(name).implementations.values():
            if way.run is value:
                return ["implementation", name, way.name]
    short = getattr(value, "__name__", "")
    for path in (f"Tensor.{short}", short):
        if callable(value) and _torch(path) is value:
            return ["torch", path]
    return None


def read(spelled: Sequence[Any]) -> Any:
    """Return the constant that `spell` wrote down; ValueError, KeyError or AttributeError if it is gone."""
    kind, *words = spelled
    if kind == "by call":
        return ByCall(words[0], tuple(words[1]))
    if kind == "device":
        return torch.device(words[0])
    if kind == "float":
        return float(words[0])
    if kind == "op":
        return overload(words[0])
    if kind == "implementation":
        return ops.get(words[0]).implementations[words[1]].run
    found = _torch(words[0]) if kind == "torch" else None
    if found is None:
        raise ValueError(f"unknown constant {spelled}")
    return found


def overload(text: str) -> Any:
    """Return the op that torch prints as `text`, such as `aten.view.default`."""
    found: Any = torch.ops
    for part in text.split("."):
        found = getattr(found, part)
    return found


def _torch(path: str) -> Any:
    found: Any = torch
    for part in path.split("."):
        found = getattr(found, part, None)
    return found
