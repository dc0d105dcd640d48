"""Removes one defence at a time and looks that the test made for it fails.

Each `*.patch` beside this file is a unified diff against the repository that takes one defence out of
`piecework/`, after a line `Test: <pytest node>` that names the test which must fail then, and a line or
two that say what the defence is for. Every patch is applied to a copy of the tree of its own.

    python tools/mutants/run.py             all patches
    python tools/mutants/run.py NAME ...    some of them, by file name without .patch

Exit status 1: a patch survived (its test passed), does not apply, or its test fails without it, too.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COPIED = ("piecework", "tests", "pyproject.toml")
FAILED = 1  # pytest's exit status where tests ran and some failed


@dataclass(frozen=True)
class Mutant:
    """A patch and the test that must fail with it."""

    name: str
    patch: Path
    test: str


def read(path: Path) -> Mutant:
    """Read a patch file; a ValueError says what is wrong with it."""
    first = path.read_text(encoding="utf-8").splitlines()[0]
    if not first.startswith("Test: "):
        raise ValueError(f"{path.name} does not begin with a line 'Test: <pytest node>'")
    return Mutant(path.stem, path, first.removeprefix("Test: ").strip())


def copy_tree(target: Path) -> None:
    """Copy what the tests need."""
    skip = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=skip)
        else:
            shutil.copy2(source, target / name)


def run_tests(tree: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    """Run tests in `tree`, on the package that lies there and not on an installed one."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    where = "import piecework, sys; sys.exit(piecework.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", where], cwd=tree, env=environment, capture_output=True, text=True
    )
    if not found.stderr.startswith(str(tree)):
        raise RuntimeError(f"the tests would run on {found.stderr.strip()} and not on the copy in {tree}")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)


def judge(mutant: Mutant) -> str:
    """Apply the patch to a copy and run its test: `killed`, or what is wrong."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder).resolve()
        copy_tree(tree)
        applied = subprocess.run(
            ["git", "apply", "--recount", "-C1", str(mutant.patch)], cwd=tree, capture_output=True, text=True
        )
        if applied.returncode:
            return f"does not apply: {applied.stderr.strip()}"
        ran = run_tests(tree, [mutant.test])
        if ran.returncode == FAILED:
            return "killed"
        if ran.returncode == 0:
            return f"survived {mutant.test}"
        return f"broken, pytest says {ran.returncode}:\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}"


def main(arguments: list[str]) -> int:
    """Run the mutants that are named, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    names = parser.parse_args(arguments).names
    paths = [HERE / f"{name}.patch" for name in names] or sorted(HERE.glob("*.patch"))
    mutants = [read(path) for path in paths]
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder).resolve()
        copy_tree(tree)
        ran = run_tests(tree, sorted({mutant.test for mutant in mutants}))
    if ran.returncode:
        print("the tests fail without any mutant, too:\n" + ran.stdout[-4000:] + ran.stderr[-2000:])
        return 1
    bad = 0
    for mutant in mutants:
        verdict = judge(mutant)
        bad += verdict != "killed"
        print(f"{mutant.name}: {verdict}", flush=True)
    print(f"{len(mutants) - bad} of {len(mutants)} killed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
