"""Removes one defence at a time and looks that the test made for it fails.

Each `*.patch` beside this file is a unified diff against the repository that takes one defence out of
`piecework/`, after a line `Test: <pytest node>` that names the test which must fail then, and a line or
two that say what the defence is for. Every patch is applied to a copy of the tree of its own, and its test
runs in a fork of a process that has imported torch and the like but not the package (`warm.py`).

    python tools/mutants/run.py             all patches
    python tools/mutants/run.py NAME ...    some of them, by file name without .patch

Exit status 1: a patch survived (its test passed), does not apply, or its test fails without it, too.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

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
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name)
        else:
            shutil.copy2(source, target / name)


class Tester:
    """The process of `warm.py`; `close` (or the end of a `with`) ends it."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONPATH", None)
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "warm.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def __enter__(self) -> Tester:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, tree: Path, tests: list[str]) -> tuple[int, str]:
        """Run tests in `tree`, on the package that lies there: pytest's exit status, and its output."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(
            json.dumps([str(tree), "-q", "-x", "-p", "no:cacheprovider", *tests]) + "\n"
        )
        self._process.stdin.flush()
        status, output = json.loads(self._process.stdout.readline())
        return status, output

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def judge(mutant: Mutant, tester: Tester) -> str:
    """Apply the patch to a copy and run its test: `killed`, or what is wrong."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder).resolve()
        copy_tree(tree)
        applied = subprocess.run(
            ["git", "apply", "--recount", "-C1", str(mutant.patch)], cwd=tree, capture_output=True, text=True
        )
        if applied.returncode:
            return f"does not apply: {applied.stderr.strip()}"
        status, output = tester.run(tree, [mutant.test])
        if status == FAILED:
            return "killed"
        if status == 0:
            return f"survived {mutant.test}"
        return f"broken, pytest says {status}:\n{output[-4000:]}"


def main(arguments: list[str]) -> int:
    """Run the mutants that are named, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    names = parser.parse_args(arguments).names
    paths = [HERE / f"{name}.patch" for name in names] or sorted(HERE.glob("*.patch"))
    mutants = [read(path) for path in paths]
    bad = 0
    with Tester() as tester:
        with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
            tree = Path(folder).resolve()
            copy_tree(tree)
            status, output = tester.run(tree, sorted({mutant.test for mutant in mutants}))
        if status:
            print("the tests fail without any mutant, too:\n" + output[-4000:])
            return 1
        for mutant in mutants:
            verdict = judge(mutant, tester)
            bad += verdict != "killed"
            print(f"{mutant.name}: {verdict}", flush=True)
    print(f"{len(mutants) - bad} of {len(mutants)} killed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
