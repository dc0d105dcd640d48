"""`piecework pull` and `piecework check-env`."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_run import Run

from piecework.cli.environment import check_environment, fits
from piecework.cli.pull import disk_size
from piecework.native import isa, library, reads_panels


def test_pull_of_a_folder_says_where_it_is(run: Run, tiny: Path) -> None:
    done = run("pull", str(tiny))
    assert done.code == 0
    assert done.out.startswith(f"{tiny} (folder, ")


def test_pull_json(run: Run, tiny: Path) -> None:
    (line,) = run("pull", str(tiny), "--json").lines
    size = sum(path.stat().st_size for path in tiny.iterdir())
    assert line == {"model": str(tiny), "kind": "folder", "path": str(tiny), "bytes": size}
    assert disk_size(tiny / "config.json") == (tiny / "config.json").stat().st_size


def test_this_machine_is_ready(run: Run) -> None:
    done = run("check-env")
    assert done.code == 0, done.out
    assert done.out.rstrip().endswith("Ready.")
    assert "torch is " in done.out


def test_check_env_json_has_a_finding_for_each_subject(run: Run) -> None:
    lines = run("check-env", "--json").lines
    subjects = {line["subject"] for line in lines}
    assert subjects == {"python", "packages", "torch", "processor", "memory", "compiler", "cache", "kernels"}
    assert {line["level"] for line in lines} <= {"ok", "note", "problem"}
    assert all(line["text"].endswith(".") for line in lines)


def test_the_kernels_are_named_and_whether_weights_are_repacked(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(*flags: str) -> str:
        return next(line for line in run("check-env", *flags).out.splitlines() if "The CPU" in line)

    with_kernels = f"ok       The CPU's kernels are built for {isa()}; weights are "
    if reads_panels():
        assert said() == with_kernels + "repacked for them, bfloat16 to 12 bits."
        assert said("--no-repack") == with_kernels + "not repacked, by these settings."
        assert said("--device", "cpu,sim") == with_kernels + "not repacked, by these settings."
    monkeypatch.setattr("piecework.devices.cpu.reads_panels", lambda: False)
    if library() is not None:
        assert said() == with_kernels + "not repacked, which needs AVX-512."
    monkeypatch.setattr("piecework.devices.cpu.library", lambda: None)
    assert said() == "note     The CPU has no kernels here: everything runs in torch, slower."


def test_a_device_that_is_not_there_is_a_problem(run: Run, tiny: Path) -> None:
    done = run("check-env", str(tiny), "--device", "npu,sim")
    assert done.code == 1 and "1 problem found." in done.out
    assert "problem  The device npu can't be used: device='npu' is not allowed: a machine with an" in done.out
    assert "ok       The device sim is there." in done.out and "It fits" not in done.out
    done = run("check-env", str(tiny), "--device", "sim")
    assert done.code == 0 and "The device sim is there." in done.out and "It fits" in done.out


def test_a_cache_that_cannot_be_written_is_a_problem(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    (finding,) = [f for f in check_environment(str(file / "cache")) if f.subject == "cache"]
    assert finding.level == "problem"
    assert "PIECEWORK_CACHE" in finding.text


def test_the_cache_names_its_models(tmp_path: Path) -> None:
    (tmp_path / "pypi").mkdir()
    (tmp_path / "pypi" / "small.gguf").write_text("")
    (finding,) = [f for f in check_environment(str(tmp_path)) if f.subject == "cache"]
    assert finding.level == "ok" and "it holds small.gguf" in finding.text


@pytest.mark.parametrize(
    ("requirement", "version", "expected"),
    [
        ("torch>=2.11,<2.14", "2.13.0+cpu", True),
        ("torch>=2.11,<2.14", "2.14.1", False),
        ("torch>=2.11,<2.14", "2.10.0", False),
        ("numpy>=1.26", "2.3.1", True),
    ],
)
def test_versions_are_compared(requirement: str, version: str, expected: bool) -> None:
    assert fits(requirement, version) is expected
