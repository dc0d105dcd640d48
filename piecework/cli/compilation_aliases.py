"""Flags of other engines for compilation settings: one table, from which the parser takes them.

`docs/compat.md` says of each how it differs from the engine that it comes from. Flags that only rename a
setting beside these, such as `--context-length`, stand with the setting in `config.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

GIVEN = object()
"""Stands for the value behind the flag."""


@dataclass(frozen=True)
class Alias:
    """A flag, the engine that it is known from, and the compilation settings that it gives.

    Attributes:
        takes: what stands behind it: nothing, one size, several, or a name.
        yields: settings whose own flags win over it, where otherwise two values are a mistake.
    """

    flag: str
    engine: str
    sets: Mapping[str, Any]
    takes: Literal["", "size", "sizes", "name"] = ""
    yields: tuple[str, ...] = ()

    @property
    def meaning(self) -> str:
        """What it sets, as help shows it: `decode_graph=eager`."""
        shown = {"size": "N", "sizes": "N,N", "name": "NAME", "": ""}[self.takes]
        return ", ".join(f"{name}={shown if value is GIVEN else value}" for name, value in self.sets.items())


def _alias(flag: str, engine: str, takes: Any = "", yields: tuple[str, ...] = (), **sets: Any) -> Alias:
    return Alias(flag, engine, MappingProxyType(sets), takes, yields)


ALIASES = (
    _alias("--disable-cuda-graph", "SGLang", decode_graph="eager", prefill_graph="eager"),
    _alias("--cuda-graph-bs", "SGLang", "sizes", decode_capture_sizes=GIVEN),
    _alias("--cuda-graph-max-bs", "SGLang", "size", max_decode_capture_size=GIVEN),
    _alias("--disable-cuda-graph-padding", "SGLang", decode_padding=False),
    _alias("--enable-piecewise-cuda-graph", "SGLang", prefill_graph="piecewise"),
    _alias("--disable-piecewise-cuda-graph", "SGLang", prefill_graph="eager"),
    _alias("--piecewise-cuda-graph-tokens", "SGLang", "sizes", prefill_capture_sizes=GIVEN),
    _alias("--piecewise-cuda-graph-max-tokens", "SGLang", "size", max_prefill_capture_size=GIVEN),
    _alias("--piecewise-cuda-graph-compiler", "SGLang", "name", compiler=GIVEN),
    _alias("--enable-piecewise-npu-graph-decode", "SGLang", decode_graph="piecewise"),
    _alias("--enable-torch-compile", "SGLang", compiler="inductor"),
    _alias(
        "--torch-compile-max-bs",
        "SGLang",
        "size",
        yields=("max_decode_capture_size", "decode_capture_sizes"),
        max_decode_capture_size=GIVEN,
    ),
    _alias("--enable-torch-compile-debug-mode", "SGLang", enable_debug_mode=True),
    _alias("--enable-npu-torchair-compile", "SGLang", compiler="dynamo:npu", splitting_ops=[]),
    _alias("--enable-torch-npugraph-ex-compile", "SGLang", compiler="dynamo:npugraph_ex", splitting_ops=[]),
    _alias("--enforce-eager", "vLLM", compiler="eager", decode_graph="eager", prefill_graph="eager"),
    _alias(
        "--cudagraph-capture-sizes",
        "vLLM",
        "sizes",
        decode_capture_sizes=GIVEN,
        prefill_capture_sizes=GIVEN,
    ),
    _alias("--max-cudagraph-capture-size", "vLLM", "size", max_capture_size=GIVEN),
)
