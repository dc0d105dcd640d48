"""The leaves of a configuration: how they are declared, found, built and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, field, fields, is_dataclass
from typing import Any, TypeGuard, TypeVar, get_type_hints

from piecework.compilation import CompilationConfig
from piecework.errors import ConfigError
from piecework.units import parse_size

T = TypeVar("T")
LONGEST_WAIT = 365 * 24 * 3600
"""The most seconds that a setting may ask to wait: threads take no infinity, and no more than 292 years."""


def setting(
    default: Any,
    help: str,
    *,
    flags: tuple[str, ...] = (),
    choices: tuple[str, ...] = (),
    size: bool = False,
    low: int | None = None,
    high: int | None = None,
) -> Any:
    """Declare one field: its default, its help, other names of its flag and its allowed values.

    A `size` counts bytes and may be written as text, `512M` or `1GiB`. Numbers lie between `low` and
    `high`; without a `low`, an integer is at least 1 and a float at least 0.
    """
    metadata = {"help": help, "flags": flags, "choices": choices, "size": size, "low": low, "high": high}
    return field(default=default, metadata=metadata)


def select(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Keep those of `values` that are leaves of `cls`."""
    known = leaves(cls)
    return {name: value for name, value in values.items() if name in known}


def _is_section(kind: Any) -> TypeGuard[type]:
    return isinstance(kind, type) and is_dataclass(kind) and not getattr(kind, "is_leaf", False)


def leaves(cls: type) -> dict[str, tuple[Field[Any], Any]]:
    """Map each leaf's name to its field and its type, depth first. Names are unique in a tree."""
    hints = get_type_hints(cls)
    found: dict[str, tuple[Field[Any], Any]] = {}
    for f in fields(cls):
        kind = hints[f.name]
        found.update(leaves(kind) if _is_section(kind) else {f.name: (f, kind)})
    return found


def build(cls: type[T], values: Mapping[str, Any]) -> T:
    """Make a config tree of `cls` from leaf names. `None` in `values` for a non-optional leaf: default."""
    known = leaves(cls)
    for name, value in values.items():
        if name not in known:
            raise ConfigError(name, value, "not a setting; known: " + ", ".join(sorted(known)))
    return _build(cls, {name: _read(*known[name], value) for name, value in values.items()})


def _read(leaf: Field[Any], kind: Any, value: Any) -> Any:
    if kind is CompilationConfig and value is not None:
        return CompilationConfig.parse(value)
    if not (leaf.metadata.get("size") and isinstance(value, str)):
        return value
    try:
        return parse_size(value)
    except ValueError as error:
        raise ConfigError(leaf.name, value, str(error)) from error


def _build(cls: type[T], values: Mapping[str, Any]) -> T:
    hints = get_type_hints(cls)
    chosen: dict[str, Any] = {}
    for f in fields(cls):  # type: ignore[arg-type]
        kind = hints[f.name]
        if _is_section(kind):
            chosen[f.name] = _build(kind, values)
        elif f.name in values and not (values[f.name] is None and f.default is not None):
            chosen[f.name] = values[f.name]
    return cls(**chosen)


def sections(cls: type) -> dict[str, type]:
    """Map each section's name to its class, depth first."""
    found: dict[str, type] = {}
    for f in fields(cls):
        kind = get_type_hints(cls)[f.name]
        if _is_section(kind):
            found.update({f.name: kind, **sections(kind)})
    return found


def check(config: Any) -> None:
    """Check every leaf of a tree against its type and choices."""
    hints = get_type_hints(type(config))
    for f in fields(config):
        value = getattr(config, f.name)
        if _is_section(hints[f.name]):
            check(value)
            continue
        _check_type(f.name, value, hints[f.name])
        choices = f.metadata.get("choices")
        if choices and value not in choices:
            raise ConfigError(f.name, value, "one of " + ", ".join(choices))
        if isinstance(value, int | float) and not isinstance(value, bool):
            _check_range(f, value, hints[f.name])


def _check_range(leaf: Field[Any], value: float, kind: Any) -> None:
    low, high = leaf.metadata.get("low"), leaf.metadata.get("high")
    fraction = float in getattr(kind, "__args__", (kind,))
    if low is None:
        low = 0 if fraction else 1
    if not value >= low or (high is not None and value > high):
        kind = "a number" if fraction else "an integer"
        upper = "" if high is None else f" and at most {high}"
        raise ConfigError(leaf.name, value, f"{kind} of at least {low}{upper}")


def _check_type(name: str, value: Any, kind: Any) -> None:
    kinds: tuple[type, ...] = getattr(kind, "__args__", (kind,))
    is_bool = isinstance(value, bool) and bool not in kinds
    if is_bool or not isinstance(value, (*kinds, int) if float in kinds else kinds):
        names = " or ".join("nothing" if k is type(None) else k.__name__ for k in kinds)
        raise ConfigError(name, value, f"a value of type {names}")
