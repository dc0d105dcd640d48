"""Builds the library, once for each content of its sources, and opens it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from piecework.cache import cache_root
from piecework.native import toolchain

log = logging.getLogger("piecework.native")

SOURCES = Path(__file__).parent / "src"
DISABLE_VARIABLE = "PIECEWORK_NATIVE"
"""`0` in this environment variable leaves the kernels out: everything runs in torch."""
_BUILD_SECONDS = 300


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the kernels, or None where they can't be had, which is logged once with the reason.

    They are built for the best instruction set of the machine, or for $PIECEWORK_ISA. It is settled at the
    first call: each call of an op asks.
    """
    if os.environ.get(DISABLE_VARIABLE) == "0":
        return None
    isa, compiler = toolchain.isa(), toolchain.compiler()
    if compiler is None:
        log.warning("no C++ compiler (c++, g++, clang++ or $CXX): the CPU's kernels run in torch, slower")
        return None
    try:
        return ctypes.CDLL(str(build(compiler, isa, cache_root() / "native")))
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("the CPU's kernels can't be built and run in torch, slower: %s", _reason(error))
        return None


def reads_panels() -> bool:
    """Whether there is a kernel that multiplies by coded weights: those for AVX-512 have one."""
    kernels = library()
    return kernels is not None and bool(kernels.piecework_reads_panels())


def build(compiler: str, isa: str, folder: Path) -> Path:
    """Return the library for `isa` in `folder`; build it unless it is there.

    Raises:
        OSError: the folder can't be written.
        subprocess.SubprocessError: the compiler failed.
    """
    sources = sorted(SOURCES.glob("*.cpp"))
    command = [compiler, *toolchain.flags(isa)]
    libraries = _openmp()
    path = folder / f"{_key([*command, *map(str, sources), *libraries], compiler)}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    # Whoever else builds the same at this time makes the same file; the last rename wins.
    with tempfile.TemporaryDirectory(dir=folder) as temporary, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [str(Path(temporary) / f"{source.stem}.o") for source in sources]
        steps = zip(sources, objects, strict=True)
        list(pool.map(lambda step: _run([*command, "-c", str(step[0]), "-o", step[1]]), steps))
        made = Path(temporary) / "kernels.so"
        _run([*command, "-shared", *objects, *libraries, "-o", str(made)])
        made.replace(path)
    return path


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_BUILD_SECONDS)


def _key(command: list[str], compiler: str) -> str:
    """Name what the library is made of, wherever its sources lie."""
    digest = hashlib.sha256(toolchain.compiler_version(compiler).encode())
    folder = str(SOURCES.parent)
    for word in command[1:]:
        digest.update(word.removeprefix(folder).encode() + b"\0")
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def _openmp() -> list[str]:
    """The OpenMP runtime that torch has loaded: a second one would start threads of its own."""
    found = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return [str(found[0])] if found else []


def _reason(error: Exception) -> str:
    text = getattr(error, "stderr", None) or str(error)
    if isinstance(text, bytes):  # of a compiler that was stopped for its time, whatever was asked for
        text = text.decode(errors="replace")
    return " ".join(text.split())[:500]
