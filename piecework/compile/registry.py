"""Compilers by name. Making one imports it, and with it the part of torch that it needs."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import cast

from piecework.compile.base import Compiler
from piecework.errors import ConfigError

PREFIX = "dynamo:"
"""Comes before the name of one of torch.compile's backends."""

_BUILT_IN: dict[str, tuple[str, str]] = {
    "eager": ("piecework.compile.eager", "EagerCompiler"),
    "inductor": ("piecework.compile.inductor", "InductorCompiler"),
    "openvino": ("piecework.compile.openvino.compiler", "OpenVinoCompiler"),
    "native": ("piecework.compile.native", "NativeCompiler"),
}


def known_compilers() -> list[str]:
    """Return the names of the compilers, with `dynamo:<backend>` for all of torch.compile's backends."""
    return [*sorted(_BUILT_IN), PREFIX + "<backend>"]


def make_compiler(name: str) -> Compiler:
    """Make the compiler `name`; an unknown name is a ConfigError that lists the known ones."""
    if name.startswith(PREFIX):
        from piecework.compile.dynamo import DynamoCompiler

        return DynamoCompiler(name.removeprefix(PREFIX))
    if name not in _BUILT_IN:
        raise ConfigError("compiler", name, "one of " + ", ".join(known_compilers()))
    module, kind = _BUILT_IN[name]
    try:
        made = cast("Callable[[], Compiler]", getattr(import_module(module), kind))
    except ImportError as error:
        allowed = f"a compiler whose package is installed, such as piecework[{name}] ({error})"
        raise ConfigError("compiler", name, allowed) from error
    return made()
