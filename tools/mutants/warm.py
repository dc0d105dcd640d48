"""Runs tests again and again, each time in a fork of a process that has imported all but the package.

    echo '["/a/tree", "-q", "tests/test_units.py"]' | python tools/mutants/warm.py

A line of standard input is a JSON list: a folder, then pytest's arguments. The tests run there, on the
package that lies there. The answer is a line with a JSON list: pytest's exit status, and what it printed.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path

# Importing these takes most of the time of a small test.
IMPORTED = (
    "hypothesis",
    "pytest",
    "torch",
    "torch._dynamo",
    "torch._inductor.config",
    "torch.fx.experimental.proxy_tensor",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
)
NOT_RUN = 70


def run_tests(tree: str, arguments: list[str]) -> int:
    """Run pytest in `tree` and return its exit status."""
    import pytest

    os.chdir(tree)
    os.environ["PYTHONPATH"] = tree
    sys.path.insert(0, tree)
    found = importlib.import_module("piecework").__file__
    if not str(found).startswith(tree):
        raise RuntimeError(f"the tests would run on {found} and not on the copy in {tree}")
    return int(pytest.main(arguments))


def run_in_a_fork(tree: str, arguments: list[str], output: Path) -> int:
    """`run_tests` in a child that prints to the file `output`; minus the signal if one ended it."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = NOT_RUN
    try:
        file = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        status = run_tests(tree, arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    """Answer each line of standard input."""
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    for name in IMPORTED:
        importlib.import_module(name)
    for line in sys.stdin:
        tree, *arguments = json.loads(line)
        output = Path(tree) / "output.txt"
        status = run_in_a_fork(tree, arguments, output)
        print(json.dumps([status, output.read_text(encoding="utf-8")]), flush=True)


if __name__ == "__main__":
    main()
