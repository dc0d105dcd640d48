"""What a machine is, as far as figures depend on it; nothing that names it."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

# As Linux names them in /proc/cpuinfo.
_ISA = ("f16c", "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16", "asimd")


def describe() -> dict[str, Any]:
    """CPU, cores, instruction sets, memory, system, Python and torch."""
    import torch

    cpu = _cpuinfo()
    flags = set(cpu.get("flags", cpu.get("Features", "")).split())
    return {
        "cpu": cpu.get("model name", platform.machine()),
        "family_model": "/".join(cpu.get(key, "?") for key in ("cpu family", "model")),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "isa": [name for name in _ISA if name in flags],
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "compiler": _first_line(["c++", "--version"], "no C++ compiler"),
    }


def commit() -> str:
    """The commit that is checked out, with a `+` where files but results differ; `?` without a repository."""
    root = str(Path(__file__).parent)
    name = _first_line(["git", "-C", root, "rev-parse", "--short", "HEAD"], "?")
    code = ["--untracked-files=no", "--", ":(top,exclude)benchmarks/results"]
    changed = _first_line(["git", "-C", root, "status", "--porcelain", *code], "")
    return f"{name}+" if changed else name


def file_name(machine: dict[str, Any]) -> str:
    """A name for results of this kind of machine, such as `amd-epyc-2-cores-avx2`."""
    widest = machine["isa"][-1] if machine["isa"] else "portable"
    return re.sub(r"[^a-z0-9]+", "-", f"{machine['cpu']} {machine['cores']} cores {widest}".lower()).strip(
        "-"
    )


def sentence(machine: dict[str, Any]) -> str:
    """One line for a page."""
    return (
        f"{machine['cpu']} (family/model {machine['family_model']}), {machine['cores']} cores, "
        f"{', '.join(machine['isa'])}, {machine['memory_gb']} GB; "
        f"{machine['system']}, Python {machine['python']}, torch {machine['torch']}, {machine['compiler']}"
    )


def _cpuinfo() -> dict[str, str]:
    """The first CPU's lines of /proc/cpuinfo; nothing where there is none."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    first = path.read_text(encoding="utf-8").split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _first_line(command: list[str], otherwise: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return otherwise
