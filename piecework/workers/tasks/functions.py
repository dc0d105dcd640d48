"""Functions that tasks call: their parameters, and a digest of their content to know them by."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

from piecework.errors import ConfigError, PieceworkError
from piecework.workers.tasks.tags import Parameter, Tag


@dataclass(frozen=True)
class Function:
    """What a task calls: `call` gets its parameters by position, tensors and scalars, and returns nothing.

    `digest` names the content: workers know a function by it, never by an address.
    """

    name: str
    call: Callable[..., None]
    parameters: tuple[Parameter, ...]
    digest: str

    @classmethod
    def of(
        cls, call: Callable[..., None], content: str | None = None, skip: int = 0, **tags: Tag
    ) -> Function:
        """Declare `call`: `tags` are the directions of its tensor parameters, the others are scalars.

        Args:
            content: what its result depends on, for callables that have more than code, such as closures.
            skip: leading parameters that the worker fills in by itself.

        Raises:
            ConfigError: a tag for a parameter that isn't there, or a function whose content can't be told.
        """
        name = getattr(call, "__qualname__", type(call).__qualname__)
        names = list(inspect.signature(call).parameters)[skip:]
        for given in tags:
            if given not in names:
                raise ConfigError(given, tags[given], f"a parameter of {name}: {', '.join(names)}")
        parameters = tuple(Parameter(one, tags.get(one)) for one in names)
        return cls.with_parameters(name, call, parameters, content)

    @classmethod
    def with_parameters(
        cls, name: str, call: Callable[..., None], parameters: Sequence[Parameter], content: str | None = None
    ) -> Function:
        """Declare a callable whose parameters are listed."""
        said = _content(call) if content is None else content
        module = getattr(call, "__module__", "")
        text = repr((module, name, [(p.name, p.tag and p.tag.value) for p in parameters], said))
        return cls(name, call, tuple(parameters), hashlib.sha256(text.encode()).hexdigest()[:32])


class Functions:
    """The functions of a runtime by digest. Closed before the first task, so that all workers know all."""

    def __init__(self, functions: Sequence[Function] = ()) -> None:
        self._found: dict[str, Function] = {}
        self._closed = False
        for function in functions:
            self.register(function)

    def register(self, function: Function) -> str:
        """Add a function and return its digest; the same content twice is one function."""
        if self._closed and function.digest not in self._found:
            raise PieceworkError(f"function {function.name} comes after the start; register it before")
        return self._found.setdefault(function.digest, function).digest

    def close(self) -> Mapping[str, Callable[..., None]]:
        """Take no more, and return what each digest calls."""
        self._closed = True
        return {digest: function.call for digest, function in self._found.items()}

    def check(self, function: Function) -> None:
        """Refuse, with a PieceworkError, a function that was not registered."""
        if function.digest not in self._found:
            known = ", ".join(sorted(f.name for f in self)) or "none"
            raise PieceworkError(f"function {function.name} is not registered; known: {known}")

    def __iter__(self) -> Iterator[Function]:
        return iter(self._found.values())


def _content(call: Any) -> str:
    code = getattr(call, "__code__", None)
    if code is None or call.__closure__ or call.__defaults__ or call.__kwdefaults__:
        raise ConfigError("content", None, f"given for {call!r}, which is more than the code of a function")
    return hashlib.sha256(repr(_code(code)).encode()).hexdigest()


def _code(code: CodeType) -> tuple[Any, ...]:
    constants = [_code(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return (code.co_code, code.co_names, code.co_varnames, constants)
