"""Each defence has a test that fails without it; and the tool that looks at that would say so."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PATCHES = sorted((ROOT / "tools" / "mutants").glob("*.patch"))


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants_run", ROOT / "tools" / "mutants" / "run.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


tool = load_tool()


@pytest.mark.parametrize("path", PATCHES, ids=lambda path: path.stem)
def test_a_patch_applies_and_names_a_test_that_exists(path):
    mutant = tool.read(path)
    file, _, name = mutant.test.partition("::")
    assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")
    check = ["git", "apply", "--check", "--recount", "-C1", str(path)]
    ran = subprocess.run(check, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "+++ b/piecework/" in path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tester():
    with tool.Tester() as tester:
        yield tester


@pytest.mark.slow
@pytest.mark.parametrize("path", PATCHES, ids=lambda path: path.stem)
def test_the_mutant_is_killed(path, tester):
    assert tool.judge(tool.read(path), tester) == "killed"


@pytest.mark.slow
def test_the_command_runs_the_tests_without_and_with_the_mutants(capsys):
    assert tool.main(["tail_not_reset"]) == 0
    assert capsys.readouterr().out == "tail_not_reset: killed\n1 of 1 killed\n"


def write_patch(folder: Path, old: str, new: str, test: str) -> Path:
    lines = (ROOT / "piecework" / "version.py").read_text(encoding="utf-8").splitlines()
    at = lines.index(next(line for line in lines if "__version__" in line))
    path = folder / "made.patch"
    path.write_text(
        f"Test: {test}\n\n--- a/piecework/version.py\n+++ b/piecework/version.py\n"
        f"@@ -{at + 1},1 +{at + 1},1 @@\n-{old or lines[at]}\n+{new}\n"
    )
    return path


@pytest.mark.slow
def test_the_tool_tells_survivors_and_broken_patches(tmp_path, tester):
    harmless = write_patch(tmp_path, "", '__version__ = "0.0.1"', "tests/test_units.py")
    assert tool.judge(tool.read(harmless), tester) == "survived tests/test_units.py"
    stale = write_patch(tmp_path, "no such line", "x = 1", "tests/test_units.py")
    assert tool.judge(tool.read(stale), tester).startswith("does not apply: ")
    missing = write_patch(tmp_path, "", '__version__ = "0.0.1"', "tests/test_units.py::test_nothing")
    assert tool.judge(tool.read(missing), tester).startswith("broken, pytest says 4")
    (tmp_path / "made.patch").write_text("--- a/x\n")
    with pytest.raises(ValueError, match=r"made\.patch does not begin with a line 'Test: "):
        tool.read(tmp_path / "made.patch")
