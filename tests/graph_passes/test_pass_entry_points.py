"""A package that is made of docs/writing-a-pass.md and nothing else: found, listed, disabled, refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tiny import save_tiny

from piecework.graph.passes import PassError, make_manager
from piecework.graph.passes.registry import GROUP

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "writing-a-pass.md").read_text(encoding="utf-8")
_FILE = re.compile(r"^File `([^`]+)`:\n\n```\w+\n(.*?)```", re.DOTALL | re.MULTILINE)
FILES: dict[str, str] = dict(_FILE.findall(PAGE))
BLOCKS = [code for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if code not in FILES.values()]


def install(folder: Path, changes: dict[str, str] | None = None) -> Path:
    """Write the page's files as an installed package into `folder`, some texts in them changed."""
    package = folder / "acme_passes"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for name, text in FILES.items():
        for old, new in (changes or {}).items():
            text = text.replace(old, new)
        (folder / name).write_text(text, encoding="utf-8")
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = folder / "acme_passes-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 1.0\n")
    points = project["entry-points"][GROUP]
    lines = [f"[{GROUP}]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    paths = [str(folder), str(ROOT)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_examples_run_as_written(tmp_path: Path) -> None:
    assert sorted(FILES) == ["acme_passes/norms.py", "acme_passes/scales.py", "pyproject.toml"]
    assert len(BLOCKS) == 2
    done = run(install(tmp_path), "-c", "\n".join(BLOCKS))
    assert done.returncode == 0, done.stderr
    assert re.search(r"acme_add_norm +applied +1 +2 -> 1 .* float32 1e-06, ", done.stdout)
    assert "allowed 1e-06" in done.stdout.splitlines()[-1]


def explain(folder: Path, model: Path, *flags: str) -> tuple[dict[str, Any], str]:
    done = run(folder, "-m", "piecework", "explain", str(model), "--json", "--dtype", "float32", *flags)
    assert done.returncode == 0, done.stderr
    body = next(p for p in json.loads(done.stdout)["programs"] if p["name"] == "body")
    return {entry["name"]: entry for entry in body["passes"]}, done.stderr


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=2)


WRONG_FILE = """
import dataclasses
import torch
from acme_passes.norms import acme_add_norm

def replacement(x, residual, weight):
    return torch.ops.piecework.acme_add_norm(x, residual, weight, 0.1)

def acme_a_wrong(eps):
    return dataclasses.replace(acme_add_norm(eps), name="acme_a_wrong", replacement=replacement)
"""
WRONG_POINT = {"acme_add_norm = ": 'acme_a_wrong = "acme_passes.wrong:acme_a_wrong"\nacme_add_norm = '}


def install_with_a_wrong_one(folder: Path) -> Path:
    """The page's package, with its wrong pass as one more; it runs before the right one."""
    install(folder, WRONG_POINT)
    (folder / "acme_passes" / "wrong.py").write_text(WRONG_FILE, encoding="utf-8")
    return folder


@pytest.mark.slow
def test_found_listed_disabled_and_refused(tmp_path: Path, model: Path) -> None:
    passes, log = explain(install_with_a_wrong_one(tmp_path), model, "--disable-passes", "acme_drop_ones")
    own = ["acme_a_wrong", "acme_add_norm", "acme_drop_ones"]
    fusions = ["split_qkv_rope", "add_rms_norm"]
    assert list(passes) == ["canonicalise", *own, "common_subexpressions", *fusions, "dead_code"]
    # The package's pass came first and left nothing of that; who expected to match is not heard of.
    assert (passes["add_rms_norm"]["matches"], passes["add_rms_norm"]["expected"]) == (0, None)
    assert passes["split_qkv_rope"]["matches"] == 2 and "pass add_rms_norm" not in log
    wrong, right, disabled = (passes[name] for name in own)
    assert (wrong["status"], wrong["matches"], wrong["ops_after"]) == ("refused", 0, wrong["ops_before"])
    assert log.count("pass acme_a_wrong: ") == 1 and "the graph is left as it was" in log
    # eps came from the model's configuration.
    assert (right["status"], right["matches"], right["error"] < 1e-6) == ("applied", 4, True)
    assert right["ops_after"] == right["ops_before"] - 4
    assert (disabled["status"], disabled["matches"]) == ("disabled", 0)


@pytest.mark.slow
def test_a_wrong_one_is_an_error_in_strict_mode(tmp_path: Path, model: Path) -> None:
    command = ("-m", "piecework", "explain", str(model), "--strict")
    done = run(install_with_a_wrong_one(tmp_path), *command)
    assert done.returncode != 0 and "pass acme_a_wrong: " in done.stderr


def test_in_process_discovery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    broken = {
        "acme_passes.norms:acme_add_norm": "acme_passes.nowhere:acme_add_norm",
        'acme_drop_ones = "': 'dead_code = "',
    }
    monkeypatch.syspath_prepend(str(install(tmp_path, broken)))
    manager = make_manager()
    assert [p.name for p in manager.passes] == ["common_subexpressions", "dead_code"]
    messages = [r.getMessage() for r in caplog.records if r.name == "piecework.passes"]
    assert messages == [
        "pass dead_code of acme-passes has the name of another pass and is left out",
        "pass acme_add_norm of acme-passes is left out: ModuleNotFoundError: "
        "No module named 'acme_passes.nowhere'",
    ]
    with pytest.raises(PassError, match=r"^pass acme_add_norm: of acme-passes can't be loaded or made: Mod"):
        make_manager(strict=True)


def test_a_module_that_ends_the_process_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    folder = install(tmp_path, {"acme_passes": "acme_ends"})
    (folder / "acme_passes").rename(folder / "acme_ends")
    (folder / "acme_ends").joinpath("norms.py").write_text("import sys\nsys.exit(0)\n")
    points = folder / "acme_passes-1.0.dist-info" / "entry_points.txt"
    points.write_text(f"[{GROUP}]\nacme_add_norm = acme_ends.norms:acme_add_norm\n")
    monkeypatch.syspath_prepend(str(folder))
    assert [p.name for p in make_manager().passes] == ["common_subexpressions", "dead_code"]
    assert "acme_add_norm of acme-passes is left out: SystemExit: 0" in caplog.text


def test_the_name_must_be_that_of_the_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = install(tmp_path, {'acme_drop_ones = "': 'drop = "', "acme_passes": "acme_renamed"})
    (folder / "acme_passes").rename(folder / "acme_renamed")
    points = folder / "acme_passes-1.0.dist-info" / "entry_points.txt"
    points.write_text(f"[{GROUP}]\ndrop = acme_renamed.scales:acme_drop_ones\n")
    monkeypatch.syspath_prepend(str(folder))
    with pytest.raises(PassError, match="pass drop: its entry point makes a pass of the name acme_drop_ones"):
        make_manager(strict=True)
