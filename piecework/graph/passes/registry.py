"""Which passes there are: the package's own, and those that other packages bring.

Another package names a function that makes a pass in its metadata:

    [project.entry-points."piecework.passes"]
    my_pass = "my_package.passes:my_pass"
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from piecework.errors import ConfigError
from piecework.graph.passes.base import Pass
from piecework.graph.passes.cleanup import COMMON_SUBEXPRESSIONS, DEAD_CODE
from piecework.graph.passes.errors import PassError
from piecework.graph.passes.manager import PassManager
from piecework.graph.passes.raise_ops import raise_linear, raise_rms_norm, raise_silu_and_mul
from piecework.graph.passes.raise_rotary import raise_rotary

log = logging.getLogger("piecework.passes")

GROUP = "piecework.passes"

RAISE: dict[str, Callable[..., Pass]] = {
    "raise_rms_norm": raise_rms_norm,
    "raise_rotary": raise_rotary,
    "raise_silu_and_mul": raise_silu_and_mul,
    "raise_linear": raise_linear,
}
"""For models that are not made of named ops; they run first."""

CLEAN: dict[str, Callable[..., Pass]] = {
    "common_subexpressions": lambda: COMMON_SUBEXPRESSIONS,
    "dead_code": lambda: DEAD_CODE,
}
"""They run last."""

ALWAYS = "canonicalise"
"""It runs before all others unless it is disabled, and is in no list."""


@dataclass(frozen=True)
class Available:
    """A pass that can be had by name. `origin` is the package that brings it."""

    name: str
    origin: str
    load: Callable[[], Callable[..., Pass]]


def available() -> dict[str, Available]:
    """All passes by name, in the order in which they run by default. Loads no foreign code.

    A foreign pass with the name of another one is left out, with a warning.
    """
    found = {name: _own(name, factory) for name, factory in RAISE.items()}
    last = {name: _own(name, factory) for name, factory in CLEAN.items()}
    for point in sorted(entry_points(group=GROUP), key=lambda p: p.name):
        origin = point.dist.name if point.dist is not None else point.value
        if point.name in found or point.name in last or point.name == ALWAYS:
            log.warning("pass %s of %s has the name of another pass and is left out", point.name, origin)
            continue
        found[point.name] = Available(point.name, origin, _loader(point))
    return found | last


def _own(name: str, factory: Callable[..., Pass]) -> Available:
    return Available(name, "piecework", lambda: factory)


def _loader(point: EntryPoint) -> Callable[[], Callable[..., Pass]]:
    def load() -> Callable[..., Pass]:
        made: Callable[..., Pass] = point.load()
        return made

    return load


def make_manager(
    passes: Sequence[str] | None = None,
    disable: Iterable[str] = (),
    *,
    foreign: bool = False,
    strict: bool = False,
    **settings: Any,
) -> PassManager:
    """Make a manager with the passes that a configuration asks for.

    Args:
        passes: their names, in the order in which they shall run; None takes all, those that raise
            torch to named ops only for `foreign` models.
        disable: names of passes to leave out; the report still lists them.
        foreign: the model is not made of named ops.
        settings: what PassManager takes besides.

    Raises:
        ConfigError: a name in `passes` or `disable` that is no pass, with those that are.
        PassError: in strict mode, a pass of another package that can't be loaded or made. Otherwise it is
            left out with a warning.
    """
    known = available()
    _known("passes", passes or (), known)
    _known("disable_passes", disable, {**known, ALWAYS: None})
    manager = PassManager(strict=strict, **settings)
    names = passes if passes is not None else [n for n in known if foreign or n not in RAISE]
    for name in names:
        try:
            _add(manager, known[name])
        except Exception as error:
            if strict or known[name].origin == "piecework":
                raise
            log.warning("pass %s of %s is left out: %s", name, known[name].origin, error)
    for name in disable:
        manager.disable(name)
    return manager


def _add(manager: PassManager, found: Available) -> None:
    factory = found.load()
    made = manager.make(factory)
    if made.name != found.name:
        raise PassError(found.name, f"its entry point makes a pass of the name {made.name}")
    manager.add(made)


def _known(field: str, names: Iterable[str], known: Iterable[str]) -> None:
    allowed = list(known)
    for name in names:
        if name not in allowed:
            raise ConfigError(field, name, f"names of {', '.join(allowed)}")
