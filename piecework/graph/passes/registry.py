"""Which passes there are: the package's own, and those that other packages bring.

Another package names a function that makes a pass in its metadata:

    [project.entry-points."piecework.passes"]
    my_pass = "my_package.passes:my_pass"
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from piecework.errors import ConfigError, PieceworkError
from piecework.graph.passes.base import Expectation, Pass
from piecework.graph.passes.cleanup import COMMON_SUBEXPRESSIONS, DEAD_CODE
from piecework.graph.passes.errors import PassError
from piecework.graph.passes.fusions import FUSIONS
from piecework.graph.passes.manager import PassManager
from piecework.graph.passes.raise_ops import raise_linear, raise_rms_norm, raise_silu_and_mul
from piecework.graph.passes.raise_rotary import raise_rotary
from piecework.graph.passes.sets import FusionPlan

log = logging.getLogger("piecework.passes")

GROUP = "piecework.passes"
OWN = "piecework"

RAISE: dict[str, Callable[..., Pass]] = {
    "raise_rms_norm": raise_rms_norm,
    "raise_rotary": raise_rotary,
    "raise_silu_and_mul": raise_silu_and_mul,
    "raise_linear": raise_linear,
}
"""For models that are not made of named ops; they run first."""

MERGE: dict[str, Callable[..., Pass]] = {"common_subexpressions": lambda: COMMON_SUBEXPRESSIONS}
"""Before the fusions: what is computed twice has two users that are one."""

CLEAN: dict[str, Callable[..., Pass]] = {"dead_code": lambda: DEAD_CODE}
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
    last = {name: _own(name, factory) for name, factory in (MERGE | FUSIONS | CLEAN).items()}
    for point in sorted(entry_points(group=GROUP), key=lambda p: p.name):
        origin = point.dist.name if point.dist is not None else point.value
        if point.name in found or point.name in last or point.name == ALWAYS:
            log.warning("pass %s of %s has the name of another pass and is left out", point.name, origin)
            continue
        found[point.name] = Available(point.name, origin, _loader(point))
    return found | last


def _own(name: str, factory: Callable[..., Pass]) -> Available:
    return Available(name, OWN, lambda: factory)


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
    fusions: FusionPlan | None = None,
    strict: bool = False,
    **settings: Any,
) -> PassManager:
    """Make a manager with the passes that a configuration asks for.

    Args:
        passes: their names, in the order in which they shall run; None takes all but the fusions that
            `fusions` doesn't choose, and those that raise torch to named ops only for `foreign` models.
        disable: names of passes to leave out; the report still lists them.
        foreign: the model is not made of named ops.
        fusions: what to choose and expect of the fusions; without it none runs by default, and one that is
            asked for should match somewhere.
        settings: what PassManager takes besides.

    Raises:
        ConfigError: a name in `passes` or `disable` that is no pass, with those that are.
        PassError: in strict mode, a pass of another package that can't be loaded or made. Otherwise it is
            left out with a warning.
    """
    known = check_names(passes, disable)
    manager = PassManager(strict=strict, **settings)
    asked = passes is not None
    if passes is None:
        chosen = fusions.chosen(list(FUSIONS), disable) if fusions is not None else []
        left_out = (FUSIONS.keys() - chosen) | (set() if foreign else RAISE.keys())
        passes = [name for name in known if name not in left_out]
    active = [name for name in passes if name not in set(disable)]
    expected: dict[str, Expectation] = {}
    if fusions is not None:
        expected = fusions.expected([name for name in active if name in FUSIONS], asked)
    if any(known[name].origin != OWN for name in active):
        expected = dict.fromkeys(expected)  # what other packages' passes leave, nobody knows
    for name in passes:
        try:
            _add(manager, known[name], expected)
        except (Exception, SystemExit) as error:  # a module that isn't a library may end the process
            origin = known[name].origin
            if origin == OWN:
                raise
            reason = str(error) if isinstance(error, PieceworkError) else f"{type(error).__name__}: {error}"
            if strict:
                raise PassError(name, f"of {origin} can't be loaded or made: {reason}") from error
            log.warning("pass %s of %s is left out: %s", name, origin, reason)
    for name in disable:
        manager.disable(name)
    return manager


def _add(manager: PassManager, found: Available, expected: Mapping[str, Expectation]) -> None:
    factory = found.load()
    made = manager.make(factory)
    if found.name in expected:
        made = replace(made, expect=expected[found.name])
    if made.name != found.name:
        raise PassError(found.name, f"its entry point makes a pass of the name {made.name}")
    manager.add(made)


def check_names(passes: Sequence[str] | None, disable: Iterable[str]) -> dict[str, Available]:
    """Refuse a name in one of a configuration's two lists that is no pass; return those that are."""
    known = available()
    for field, names, allowed in (
        ("passes", passes or (), list(known)),
        ("disable_passes", disable, [*known, ALWAYS]),
    ):
        for name in names:
            if name not in allowed:
                always = f" ({ALWAYS} runs in any case)" if field == "passes" else ""
                raise ConfigError(field, name, f"names of {', '.join(allowed)}{always}")
    return known
