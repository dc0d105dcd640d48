"""Flags made from a configuration tree: one flag a leaf, so that no setting is written down twice.

A value given as a flag wins over one in the file of `--config`, which wins over the default.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from types import NoneType
from typing import Any, TypeVar

from piecework.cli.compilation_flags import add_compilation_flags, compilation_changes
from piecework.cli.parser import UserError
from piecework.compilation import OTHER_NAMES, read_object
from piecework.config import build, leaves, read_file, select
from piecework.units import format_size, parse_size

T = TypeVar("T")
COMPILATION = "compilation_config"


def add_config_flags(parser: argparse.ArgumentParser, *trees: type) -> None:
    """Add `--config FILE` and a flag for every leaf of `trees`, in one help group a section.

    A flag that is not given leaves no attribute on the namespace, so that the file can speak.
    """
    parser.add_argument("--config", metavar="FILE", help="a YAML file with settings; flags win over it")
    for tree in trees:
        group = parser.add_argument_group(_title(tree))
        for name, (leaf, kind) in leaves(tree).items():
            _add_flag(group, name, leaf.default, kind, leaf.metadata)
        if COMPILATION in leaves(tree):
            add_compilation_flags(parser)


def add_model_argument(parser: argparse.ArgumentParser, help: str) -> None:
    """Add MODEL, another way to give --model; `model_from_args` reads it."""
    parser.add_argument("given_model", nargs="?", metavar="MODEL", help=f"{help}, as --model")


def model_from_args(args: argparse.Namespace) -> dict[str, str]:
    """Return MODEL as a setting, nothing where it wasn't given. Raises UserError where --model was too."""
    if args.given_model is None:
        return {}
    if hasattr(args, "model"):
        raise UserError(f"the model is given twice: {args.given_model} and --model {args.model}")
    return {"model": args.given_model}


def config_from_args(tree: type[T], args: argparse.Namespace, **overrides: Any) -> T:
    """Build `tree` from the parsed flags, the file of `--config` and the defaults, in this order.

    `overrides` are values that the command itself decides; they win over everything.
    Raises ConfigError with the field, the value and what is allowed.
    """
    return build(tree, {**given_settings(tree, args), **overrides})


def given_settings(tree: type, args: argparse.Namespace) -> dict[str, Any]:
    """Return the leaves of `tree` that were given, in the file of `--config` or as flags; plain values."""
    file = getattr(args, "config", None)
    values = select(tree, read_file(file)) if file else {}
    values.update(select(tree, vars(args)))
    changes = compilation_changes(args)
    if changes and COMPILATION in leaves(tree):
        # What was settled by a flag is not looked at in the JSON, where it may be wrong.
        stated = read_object(values.get(COMPILATION, {}))
        kept = {key: v for key, v in stated.items() if OTHER_NAMES.get(key, key) not in changes}
        values[COMPILATION] = {**kept, **changes}
    return values


def _title(tree: type) -> str:
    return tree.__name__.removesuffix("Config").removesuffix("Options").lower() + " settings"


def flag_name(leaf: str) -> str:
    """Return the flag of a leaf: `page_size` becomes `--page-size`."""
    return "--" + leaf.replace("_", "-")


def _add_flag(group: argparse._ArgumentGroup, name: str, default: Any, kind: Any, metadata: Any) -> None:
    flags = (flag_name(name), *metadata.get("flags", ()))
    base = next(k for k in getattr(kind, "__args__", (kind,)) if k is not NoneType)
    shared: dict[str, Any] = {
        "dest": name,
        "default": argparse.SUPPRESS,
        "help": _help(metadata, default),
    }
    if base is bool:
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, **shared)
        return
    parse: Callable[[str], Any] = base
    metavar = {int: "N", float: "X"}.get(base, name.split("_")[-1].upper())
    if metadata.get("size"):
        parse, metavar = size, "SIZE"
    elif getattr(base, "is_leaf", False):
        parse, metavar = str, "JSON"  # read with the rest of the tree, so that a file may hold it too
    choices = metadata.get("choices") or None
    group.add_argument(*flags, type=parse, choices=choices, metavar=None if choices else metavar, **shared)


def _help(metadata: Any, default: Any) -> str:
    text = str(metadata["help"]).replace("%", "%%")
    if default is None or "default" in text:
        return text
    shown = format_size(default) if metadata.get("size") else default
    return f"{text} (default: {shown})"


def size(text: str) -> int:
    """Parse a size flag for argparse, whose messages keep the reason only for its own error type."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def positive(text: str) -> int:
    """Parse a count of at least one for argparse."""
    try:
        value = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from error
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not allowed: a whole number of at least 1")
    return value
