"""Puts each peer into a virtual environment of its own; what is there already stays as it is."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

_TORCH = "torch>=2.11,<2.14"

# Folder -> the module that shows that it is whole, and what pip installs, call by call. llama-cpp-python
# is built from source, for this machine's instruction set. torch comes first, so that what follows keeps it.
ENVIRONMENTS: dict[str, tuple[str, list[list[str]]]] = {
    "llama": ("llama_cpp.server", [["llama-cpp-python[server]"]]),
    "ov": (
        "openvino_genai",
        [[_TORCH], ["openvino-genai", "optimum-intel[openvino]", _TORCH]],
    ),
}


def python_of(folder: Path, name: str) -> Path:
    """The interpreter of an environment."""
    return folder / name / "bin" / "python"


def installed(folder: Path, name: str) -> bool:
    """Whether the environment has its peer."""
    python = python_of(folder, name)
    find = f"import importlib.util as u; raise SystemExit(u.find_spec({ENVIRONMENTS[name][0]!r}) is None)"
    return python.exists() and subprocess.run([python, "-c", find], capture_output=True).returncode == 0


def install(folder: Path, names: list[str], pip_flags: list[str]) -> None:
    """Make the environments `names` in `folder` where they are missing; minutes, with a C++ compiler.

    `pip_flags` go to pip. Raises CalledProcessError where pip fails; it says why on its own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        if installed(folder, name):
            continue
        print(f"installing {name} into {folder / name}", file=sys.stderr)
        venv.create(folder / name, with_pip=True)
        environment = {"CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count()), **os.environ}
        for packages in ENVIRONMENTS[name][1]:
            command = [str(python_of(folder, name)), "-m", "pip", "install", "--quiet", *pip_flags, *packages]
            subprocess.run(command, check=True, env=environment)
