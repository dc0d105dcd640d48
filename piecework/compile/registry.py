"""Compilers by name."""

from __future__ import annotations

from collections.abc import Callable

from piecework.compile.base import Compiler
from piecework.compile.dynamo import PREFIX, DynamoCompiler
from piecework.compile.eager import EagerCompiler
from piecework.compile.inductor import InductorCompiler
from piecework.errors import ConfigError

_BUILT_IN: dict[str, Callable[[], Compiler]] = {"eager": EagerCompiler, "inductor": InductorCompiler}


def known_compilers() -> list[str]:
    """Return the names of the compilers, with `dynamo:<backend>` for all of torch.compile's backends."""
    return [*sorted(_BUILT_IN), PREFIX + "<backend>"]


def make_compiler(name: str) -> Compiler:
    """Make the compiler `name`; an unknown name is a ConfigError that lists the known ones."""
    if name.startswith(PREFIX):
        return DynamoCompiler(name.removeprefix(PREFIX))
    if name not in _BUILT_IN:
        raise ConfigError("compiler", name, "one of " + ", ".join(known_compilers()))
    return _BUILT_IN[name]()
