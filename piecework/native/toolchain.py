"""What the kernels are built with: the instruction set, its compiler flags, and the compiler."""

from __future__ import annotations

import functools
import logging
import os
import platform
import shutil
import subprocess
from pathlib import Path

from piecework.errors import ConfigError

log = logging.getLogger(__name__)

_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni")
ISAS: dict[str, tuple[str, ...]] = {
    "avx512_bf16": (*_AVX512, "avx512_bf16"),
    "avx512": _AVX512,
    "avx2": _AVX2,
    "portable": (),
}
"""Instruction sets, the best first, each with the features that /proc/cpuinfo must name."""

ISA_VARIABLE = "PIECEWORK_ISA"
"""An environment variable that forces a lesser instruction set than the machine's."""


@functools.cache
def supported() -> tuple[str, ...]:
    """Return the instruction sets that this machine has, the best first."""
    features = _features()
    return tuple(name for name, needed in ISAS.items() if features.issuperset(needed))


def _features() -> frozenset[str]:
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return frozenset()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


def isa() -> str:
    """Return the instruction set to build for: the machine's best, or what $PIECEWORK_ISA asks for."""
    asked = os.environ.get(ISA_VARIABLE)
    if asked and asked not in supported():
        raise ConfigError(ISA_VARIABLE, asked, "one of " + ", ".join(supported()))
    return asked or supported()[0]


def flags(name: str) -> list[str]:
    """Return the compiler's flags for the instruction set `name`.

    Nothing of -ffast-math: it makes the whole process flush denormals.
    """
    features = [f"-m{feature.replace('avx512_', 'avx512')}" for feature in ISAS[name]]
    return ["-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-Wno-psabi", *features]


@functools.cache
def compiler() -> str | None:
    """Return the path of $CXX, or where it is not set of c++, g++ or clang++; None where there is none."""
    asked = os.environ.get("CXX")
    found = next(filter(None, map(shutil.which, [asked] if asked else ["c++", "g++", "clang++"])), None)
    if asked and found is None:
        log.warning("CXX=%r is not found", asked)
    return found


@functools.cache
def compiler_version(path: str) -> str:
    """Return what the compiler says of itself."""
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return done.stdout.strip()
