"""Puts each peer into a virtual environment of its own; what is there already stays as it is."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

_TORCH = "torch>=2.11,<2.14"

# Folder -> the module that shows that it is whole, and what pip does, call by call. llama-cpp-python is
# built from source, for this machine's instruction set. torch comes first, so that what follows keeps it;
# torchvision goes again: one for CUDA beside a torch for the CPU breaks transformers, and text needs none.
ENVIRONMENTS: dict[str, tuple[str, list[list[str]]]] = {
    "llama": ("llama_cpp.server", [["install", "llama-cpp-python[server]"]]),
    "ov": (
        "optimum.intel",
        [
            ["install", _TORCH],
            ["install", "openvino-genai", "optimum-intel[openvino]", _TORCH],
            ["uninstall", "--yes", "torchvision"],
        ],
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
        for verb, *rest in ENVIRONMENTS[name][1]:
            flags = pip_flags if verb == "install" else []
            command = [str(python_of(folder, name)), "-m", "pip", verb, "--quiet", *flags, *rest]
            subprocess.run(command, check=True, env=environment)
