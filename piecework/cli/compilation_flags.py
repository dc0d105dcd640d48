"""Flags for single settings of `--compilation-config`; a flag wins over the same key in the JSON.

Those that other engines have for the same things come from the table in `compilation_aliases.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from piecework.cli.compilation_aliases import ALIASES, GIVEN, Alias
from piecework.cli.parser import UserError
from piecework.compilation import DECODE_GRAPHS, PREFILL_GRAPHS

_PREFIX = "compilation."
_ALIAS = "alias."


def add_compilation_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags in groups of their own; one that is not given leaves no attribute."""
    group = parser.add_argument_group("compilation settings, each a key of --compilation-config")

    def add(name: str, text: str, *others: str, **how: Any) -> None:
        flags = ("--" + name.replace("_", "-"), *others)
        group.add_argument(*flags, dest=_PREFIX + name, default=argparse.SUPPRESS, help=text, **how)

    switch: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
    add(
        "compiler",
        "native, eager, inductor, dynamo:<backend>, or auto: the device's choice",
        metavar="NAME",
    )
    add("decode_graph", "how decode steps run", choices=DECODE_GRAPHS)
    add("prefill_graph", "how steps with prompt tokens run", choices=PREFILL_GRAPHS)
    sizes: dict[str, Any] = {"type": _sizes, "metavar": "N,N"}
    add("decode_capture_sizes", "batch sizes to capture for decode", "--capture-sizes", **sizes)
    add("prefill_capture_sizes", "token counts to capture for prefill", **sizes)
    add("max_capture_size", "the largest of the default sizes", type=int, metavar="N")
    add("max_decode_capture_size", "the same, for decode alone", type=int, metavar="N")
    add("max_prefill_capture_size", "the same, for prefill alone", type=int, metavar="N")
    add("decode_padding", "pad decode batches to the next captured size (default: yes)", **switch)
    names: dict[str, Any] = {"type": _names, "metavar": "NAME,NAME"}
    add("splitting_ops", "the ops between pieces", **names)
    add("chain", "run a whole step as one call where all its pieces are native (default: yes)", **switch)
    add("passes", "the passes to run, in this order", **names)
    add("disable_passes", "passes to leave out", **names)
    add("verify_passes", "hold every rewrite to its declared error, on random inputs", **switch)
    add("enable_debug_mode", "check every input address at every replay", **switch)
    add("compile_cache_dir", "where compiled pieces are kept", metavar="DIR")
    add("strict", "make every fall-back, recompile and missed expectation an error", **switch)

    others = parser.add_argument_group("flags of SGLang and vLLM for these settings, see docs/compat.md")
    for alias in ALIASES:
        _add_alias(others, alias)


def compilation_changes(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that were given as flags, by name; values are checked by CompilationConfig.

    Raises UserError where two flags give one setting different values.
    """
    given = vars(args)
    found: dict[str, Any] = {}
    source: dict[str, str] = {}

    def take(name: str, value: Any, flag: str) -> None:
        if name in found and not _same(found[name], value):
            both = f"{found[name]!r} by {source[name]} and {value!r} by {flag}"
            raise UserError(f"{name} is given twice: {both}")
        found[name] = value
        source[name] = flag

    for key, value in given.items():
        if key.startswith(_PREFIX):
            name = key.removeprefix(_PREFIX)
            take(name, value, "--" + name.replace("_", "-"))
    for alias in sorted(ALIASES, key=lambda alias: len(alias.yields)):
        if _ALIAS + alias.flag in given and not found.keys() & set(alias.yields):
            for name, value in alias.sets.items():
                take(name, given[_ALIAS + alias.flag] if value is GIVEN else value, alias.flag)
    return found


def _same(one: Any, other: Any) -> bool:
    """Say whether two values mean the same; the order of sizes, which are numbers, means nothing."""
    if isinstance(one, list) and isinstance(other, list) and all(isinstance(n, int) for n in one + other):
        return set(one) == set(other)
    return bool(one == other)


def _add_alias(group: argparse._ArgumentGroup, alias: Alias) -> None:
    how: dict[str, Any] = {"dest": _ALIAS + alias.flag, "default": argparse.SUPPRESS}
    how["help"] = f"{alias.engine}: {alias.meaning}"
    if not alias.takes:
        how |= {"action": "store_true"}
    elif alias.takes == "sizes":
        how |= {"nargs": "+", "type": _sizes, "action": _Flat, "metavar": "N"}
    else:
        how |= {
            "type": int if alias.takes == "size" else str,
            "metavar": "N" if alias.takes == "size" else "NAME",
        }
    group.add_argument(alias.flag, **how)


class _Flat(argparse.Action):
    """Store one list of all the words behind a flag: `1 2 4`, `1,2,4` and `[1,2,4]` are the same."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        """Set the attribute."""
        setattr(namespace, self.dest, [size for word in values for size in word])


def _listed(parse: Callable[[str], Any], what: str) -> Callable[[str], list[Any]]:
    def read(text: str) -> list[Any]:
        try:
            inside = text[1:-1] if text[:1] + text[-1:] == "[]" else text
            return [parse(part.strip()) for part in inside.split(",") if part.strip()]
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of {what}") from error

    return read


_sizes = _listed(int, "sizes such as 1,2,4")
_names = _listed(str, "names")
