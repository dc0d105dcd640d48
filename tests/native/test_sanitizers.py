"""Attention, the linears, look-ups and moves in a program of their own, under the sanitizers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from piecework.native import toolchain
from piecework.native.library import SOURCES

HERE = Path(__file__).parent
NAMES = (
    "attention",
    "linear",
    "block_linear",
    "int8_linear",
    "embedding",
    "file_blocks",
    "run",
    "move",
    "coded",
)
KERNELS = [SOURCES / f"{name}.cpp" for name in NAMES]
compiler = toolchain.compiler()


@pytest.mark.slow
@pytest.mark.skipif(compiler is None, reason="there is no C++ compiler")
@pytest.mark.parametrize(
    ("sanitizer", "isa"),
    [
        ("address,undefined", toolchain.supported()[0]),
        ("address,undefined", "portable"),
        ("thread", toolchain.supported()[0]),  # threads share their work out in the same code for all
    ],
)
def test_kernels_under_a_sanitizer(tmp_path: Path, sanitizer: str, isa: str) -> None:
    assert compiler is not None
    program = tmp_path / "harness"
    sources = [HERE / "harness.cpp", *KERNELS]
    flags = [f for f in toolchain.flags(isa) if f not in ("-shared", "-O3")]
    if sanitizer == "thread":
        sources.append(HERE / "openmp_threads.cpp")
    else:
        flags.append("-fno-sanitize-recover")
    command = [compiler, *flags, "-O1", "-g", "-w", f"-fsanitize={sanitizer}", f"-I{SOURCES}"]
    built = subprocess.run(
        [*command, *map(str, sources), "-o", str(program)], capture_output=True, text=True, check=False
    )
    if built.returncode and "cannot find" in built.stderr:
        pytest.skip(f"the compiler has no {sanitizer} sanitizer")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout == "ok\n", done.stdout + done.stderr[:5000]
