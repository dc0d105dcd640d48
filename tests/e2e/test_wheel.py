"""One wheel runs on every machine: with the kernels of each instruction set, and without a compiler."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from piecework.errors import ModelError
from piecework.native import toolchain
from piecework.weights.source import resolve

ROOT = Path(__file__).parents[2]
PROMPT = "The capital of France is"
TOKENS = 12

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model() -> Path:
    try:
        return resolve("smollm2-135m").path
    except ModelError as error:
        pytest.skip(f"the default model can't be had here: {error}")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of these sources, built from a copy, since building leaves files beside them."""
    pytest.importorskip("setuptools", minversion="77")
    pytest.importorskip("pip")
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"
    shutil.copytree(
        ROOT / "piecework", sources / "piecework", ignore=shutil.ignore_patterns("__pycache__", "*.so")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(folder)]
    _run([sys.executable, "-m", "pip", "wheel", *options, str(sources)])
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def bin_folder(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a new environment that has the wheel, and the packages of this one behind it."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    _run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--quiet", str(wheel)]
    )
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder / "bin"


def _run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PIECEWORK_", "PYTHON", "CXX"))}
    done = subprocess.run(
        command, capture_output=True, text=True, env={**kept, **environment}, cwd="/", check=False
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done


def _generate(bin_folder: Path, model: Path, cache: Path, **environment: str) -> tuple[list[int], str]:
    """The tokens that the installed command makes, and what it says on standard error."""
    command = [str(bin_folder / "piecework"), "generate", "--model", str(model), "--dtype", "float32"]
    command += ["--prompt", PROMPT, "--max-tokens", str(TOKENS), "--temperature", "0", "--json"]
    done = _run(command, PIECEWORK_CACHE=str(cache), **environment)
    (line,) = done.stdout.splitlines()
    ids: list[int] = json.loads(line)["token_ids"]
    return ids, done.stderr


@pytest.fixture(scope="module")
def without_compiler(bin_folder: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """The tokens of the torch path, which says once why it is taken."""
    cache = tmp_path_factory.mktemp("cache")
    ids, said = _generate(bin_folder, model, cache, PATH=str(bin_folder))
    assert said.count("no C++ compiler") == 1, said
    assert not (cache / "native").exists()
    assert len(ids) == TOKENS
    return ids


def test_the_wheel_is_what_runs(bin_folder: Path) -> None:
    code = "from piecework.native.library import SOURCES; print(SOURCES, len(list(SOURCES.glob('*.cpp'))))"
    place, count = _run([str(bin_folder / "python"), "-c", code]).stdout.split()
    assert Path(place).is_relative_to(bin_folder.parent)
    assert int(count) == len(list((ROOT / "piecework" / "native" / "src").glob("*.cpp")))


# The machine's own set without being asked for, and the others.
SETS = [None, *(n for n in ("avx2", "portable") if n in toolchain.supported()[1:])]


@pytest.mark.skipif(toolchain.compiler() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("isa", SETS)
def test_every_instruction_set_gives_the_tokens_of_torch(
    bin_folder: Path, model: Path, without_compiler: list[int], tmp_path: Path, isa: str | None
) -> None:
    ids, said = _generate(bin_folder, model, tmp_path, **({"PIECEWORK_ISA": isa} if isa else {}))
    assert "no C++ compiler" not in said and "can't be built" not in said
    assert len(list((tmp_path / "native").glob("*.so"))) == 1
    assert ids == without_compiler
