"""Flags for single settings of `--compilation-config`; a flag wins over the same key in the JSON."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from piecework.compilation import DECODE_GRAPHS, PREFILL_GRAPHS

_PREFIX = "compilation."


def add_compilation_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags in a group of their own; one that is not given leaves no attribute."""
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
    group.add_argument(
        "--enable-torch-compile",
        dest=_PREFIX + "compiler",
        action="store_const",
        const="inductor",
        default=argparse.SUPPRESS,
        help="the same as --compiler inductor",
    )
    add("decode_graph", "how decode steps run", choices=DECODE_GRAPHS)
    add("prefill_graph", "how steps with prompt tokens run", choices=PREFILL_GRAPHS)
    sizes: dict[str, Any] = {"type": _sizes, "metavar": "N,N"}
    add("decode_capture_sizes", "batch sizes to capture for decode", "--capture-sizes", **sizes)
    add("prefill_capture_sizes", "token counts to capture for prefill", **sizes)
    add("max_capture_size", "the largest of the default sizes", type=int, metavar="N")
    names: dict[str, Any] = {"type": _names, "metavar": "NAME,NAME"}
    add("splitting_ops", "the ops between pieces", **names)
    add("chain", "run a whole step as one call where all its pieces are native (default: yes)", **switch)
    add("passes", "the passes to run, in this order", **names)
    add("disable_passes", "passes to leave out", **names)
    add("verify_passes", "hold every rewrite to its declared error, on random inputs", **switch)
    add("enable_debug_mode", "check every input address at every replay", **switch)
    add("compile_cache_dir", "where compiled pieces are kept", metavar="DIR")
    add("strict", "make every fall-back, recompile and missed expectation an error", **switch)


def compilation_changes(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that were given as flags, by name; values are checked by CompilationConfig."""
    return {name.removeprefix(_PREFIX): v for name, v in vars(args).items() if name.startswith(_PREFIX)}


def _listed(parse: Callable[[str], Any], what: str) -> Callable[[str], list[Any]]:
    def read(text: str) -> list[Any]:
        try:
            return [parse(part.strip()) for part in text.split(",") if part.strip()]
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of {what}") from error

    return read


_sizes = _listed(int, "sizes such as 1,2,4")
_names = _listed(str, "names")
