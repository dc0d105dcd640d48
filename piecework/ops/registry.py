"""Named ops: a schema, a reference in plain torch, a fake, and ordered implementations per device.

An op is defined once with `define`. Its reference says what it means and is also its plain
implementation. Any number of other implementations are added with `Op.implement`, each under a short
name ("cpu", "triton", ...) and with an optional support test. A device lists the names it prefers, in
order; `Op.resolve` gives the first one that supports the call. The kernels under the dispatch keys
(CPU, CUDA, PrivateUse1) do the same with each key's default order, so that an op called eagerly runs
without a device object. All keys are registered at once, whatever hardware is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from piecework.errors import PieceworkError

NAMESPACE = "piecework"
REFERENCE = "reference"
DEFAULT_ORDER: dict[str, tuple[str, ...]] = {
    "CPU": ("cpu", REFERENCE),
    "CUDA": ("triton", "cuda", REFERENCE),
    "PrivateUse1": ("npu", "triton", REFERENCE),
}

_library = torch.library.Library(NAMESPACE, "DEF")


class UnsupportedOpError(PieceworkError):
    """No implementation in a device's list supports a call; the message lists those that were asked."""


@dataclass(frozen=True)
class Implementation:
    """One way to run an op. `supports` gets the op's arguments; None supports every call.

    `inline`: a compiler that fuses is better off with the reference written out than with a call of this.
    """

    name: str
    run: Callable[..., Any]
    supports: Callable[..., bool] | None = None
    inline: bool = False


class Op:
    """A named op and its implementations. Call it through `torch.ops.piecework.<name>`."""

    def __init__(self, name: str, schema: str, reference: Callable[..., Any], mutates: bool) -> None:
        self.name = name
        self.schema = schema
        self.mutates = mutates
        self.reference = reference
        self.implementations: dict[str, Implementation] = {REFERENCE: Implementation(REFERENCE, reference)}

    @property
    def qualified_name(self) -> str:
        """The name with its namespace, as `splitting_ops` and passes spell it."""
        return f"{NAMESPACE}::{self.name}"

    @property
    def overload(self) -> Any:
        """The callable that appears as a node's target in a traced graph."""
        return getattr(torch.ops.piecework, self.name).default

    def implement(
        self, name: str, supports: Callable[..., bool] | None = None, *, inline: bool = False
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Add an implementation under `name`, replacing one of the same name; use it as a decorator."""

        def add(run: Callable[..., Any]) -> Callable[..., Any]:
            self.implementations[name] = Implementation(name, run, supports, inline)
            return run

        return add

    def candidates(self, order: Sequence[str]) -> list[Implementation]:
        """Return the implementations that `order` names, in its order; names the op lacks are skipped."""
        return [self.implementations[name] for name in order if name in self.implementations]

    def resolve(self, order: Sequence[str], *args: Any) -> Implementation:
        """Return the first implementation of `order` that supports a call with `args`."""
        found = self.candidates(order)
        for implementation in found:
            if implementation.supports is None or implementation.supports(*args):
                return implementation
        asked = ", ".join(i.name for i in found) or "none"
        raise UnsupportedOpError(
            f"{self.qualified_name}: no implementation supports this call (asked: {asked})"
        )


_ops: dict[str, Op] = {}


def define(
    schema: str, reference: Callable[..., Any], fake: Callable[..., Any], *, mutates: bool = False
) -> Op:
    """Define the op `schema` (as torch.library writes it), with its meaning and its fake.

    Args:
        schema: for example `rms_norm(Tensor x, Tensor weight, float eps) -> Tensor`.
        reference: the meaning in plain torch, with the schema's arguments.
        fake: gives the outputs' shapes and dtypes without computing; must accept symbolic sizes.
        mutates: the op writes into an argument, so it must keep its place in a graph.
    """
    name = schema.split("(", 1)[0].strip()
    op = Op(name, schema, reference, mutates)
    tags = (torch.Tag.pt2_compliant_tag,)
    _library.define(schema, tags=tags)
    for key, order in DEFAULT_ORDER.items():
        _library.impl(name, _kernel(op, order), key)
    torch.library.register_fake(op.qualified_name, fake, lib=_library)
    _ops[name] = op
    return op


def _kernel(op: Op, order: Sequence[str]) -> Callable[..., Any]:
    def kernel(*args: Any) -> Any:
        for name in order:
            implementation = op.implementations.get(name)
            if implementation and (implementation.supports is None or implementation.supports(*args)):
                return implementation.run(*args)
        return op.resolve(order, *args)  # raises, with the list

    return kernel


def get(name: str) -> Op:
    """Return the op `name`, with or without its namespace; an unknown one is a KeyError that lists all."""
    short = name.removeprefix(NAMESPACE + "::")
    if short not in _ops:
        raise KeyError(f"no op {name!r}; known: {', '.join(sorted(_ops))}")
    return _ops[short]


def names() -> list[str]:
    """Return the names of all ops, sorted."""
    return sorted(_ops)
