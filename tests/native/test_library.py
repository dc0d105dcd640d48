"""The library is built once for its sources and an instruction set, and not at all where it can't be."""

from __future__ import annotations

import ctypes
import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from piecework.errors import ConfigError
from piecework.native import isa, library, toolchain
from piecework.native.library import build

# The package has a function of the module's name.
library_module = importlib.import_module("piecework.native.library")
compiler = toolchain.compiler()
needs_compiler = pytest.mark.skipif(compiler is None, reason="there is no C++ compiler")


@needs_compiler
def test_threads_are_those_of_torch() -> None:
    kernels = library()
    assert kernels is not None
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert kernels.piecework_threads() == threads
    finally:
        torch.set_num_threads(before)


@needs_compiler
@pytest.mark.parametrize("name", toolchain.supported())
def test_a_build_is_kept_until_a_source_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert compiler is not None
    sources, folder = tmp_path / "src", tmp_path / "built"
    sources.mkdir()
    for file in ("threads.cpp", "types.h"):
        shutil.copy(library_module.SOURCES / file, sources)
    monkeypatch.setattr(library_module, "SOURCES", sources)
    made = build(compiler, name, folder)
    changed = made.stat().st_mtime_ns
    assert build(compiler, name, folder) == made and made.stat().st_mtime_ns == changed
    assert [p.name for p in folder.iterdir()] == [made.name]
    with (sources / "types.h").open("a") as header:
        header.write("// changed\n")
    assert build(compiler, name, folder) != made


# Those of this machine's own set are built by each test of a kernel, and those of these two, too.
BUILT_ELSEWHERE = {"portable", "avx2"}  # by test_other_instruction_sets.py


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*toolchain.supported()[1:]} - BUILT_ELSEWHERE))
def test_all_sources_build_for_every_instruction_set(tmp_path: Path, name: str) -> None:
    assert compiler is not None
    assert ctypes.CDLL(str(build(compiler, name, tmp_path))).piecework_threads() >= 1


def test_an_instruction_set_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(toolchain.ISA_VARIABLE, "sse9")
    with pytest.raises(ConfigError, match=r"PIECEWORK_ISA.*sse9.*portable"):
        isa()


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"CXX": "", "PATH": "/nowhere"}, "no C++ compiler"),
        ({"CXX": "no-such-compiler"}, "CXX='no-such-compiler' is not found"),
        pytest.param({"CXX": "/bin/false"}, "can't be built", marks=pytest.mark.slow),
        pytest.param({"PIECEWORK_NATIVE": "0"}, None, marks=pytest.mark.slow),
    ],
)
def test_without_a_library_torch_runs(environment: dict[str, str], said: str | None, tmp_path: Path) -> None:
    code = "from piecework.native import library; print(library(), library())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "PIECEWORK_CACHE": str(tmp_path), **environment},
        check=True,
    )
    assert done.stdout.split() == ["None", "None"]
    assert done.stderr.count("slower") == (1 if said else 0)
    assert said is None or said in done.stderr


def test_a_compiler_that_takes_too_long_is_told() -> None:
    slow = subprocess.TimeoutExpired(["c++"], 300, stderr=b"attention.cpp: in\xff function")
    assert library_module._reason(slow) == "attention.cpp: in\ufffd function"
