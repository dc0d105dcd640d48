"""Checks of the machine and the installation, each a plain sentence; nothing here needs torch to be there."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from piecework.config.processors import usable_processors
from piecework.units import format_size

MIN_PYTHON = (3, 11)
MIN_MEMORY = 2 * 2**30
INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "asimd", "bf16")


@dataclass(frozen=True)
class Finding:
    """One sentence about the environment. `level`: ok, note (works, but worth knowing), or problem."""

    subject: str
    level: str
    text: str


def check_environment(cache_dir: str | None = None) -> list[Finding]:
    """Run every check; one that breaks is itself a finding, so that the others still speak."""
    checks: dict[str, Callable[[], Iterator[Finding]]] = {
        "python": _python,
        "packages": _packages,
        "torch": _torch,
        "processor": _processor,
        "memory": _memory,
        "compiler": _compiler,
        "cache": lambda: _cache(cache_dir),
    }
    findings: list[Finding] = []
    for subject, run in checks.items():
        try:
            findings.extend(run())
        except Exception as error:
            findings.append(
                Finding(subject, "problem", f"The check failed: {type(error).__name__}: {error}.")
            )
    return findings


def _python() -> Iterator[Finding]:
    version = platform.python_version()
    if sys.version_info[:2] < MIN_PYTHON:
        wanted = ".".join(map(str, MIN_PYTHON))
        yield Finding("python", "problem", f"Python is {version}; Piecework needs {wanted} or newer.")
    else:
        yield Finding("python", "ok", f"Python is {version}, at {sys.executable}.")


def _packages() -> Iterator[Finding]:
    try:
        stated = metadata.requires("piecework") or []
    except metadata.PackageNotFoundError:
        yield Finding("packages", "problem", "Piecework is not installed; run pip install in its folder.")
        return
    missing: dict[str, list[str]] = {}
    for line in stated:
        extra = (re.search(r"extra\s*==\s*['\"](\w+)['\"]", line) or ["", ""])[1]
        requirement = line.split(";")[0].strip()
        name = (re.match(r"[\w.-]+", requirement) or [""])[0]
        found = _installed(name)
        if name == "torch":
            continue  # has a check of its own
        if found is None:
            missing.setdefault(extra, []).append(name)
        elif not extra and not fits(requirement, found):
            yield Finding("packages", "problem", f"{name} is {found}, but Piecework needs {requirement}.")
    base = missing.pop("", [])
    if base:
        yield Finding("packages", "problem", f"Missing packages: {', '.join(base)}; pip installs them.")
    else:
        yield Finding("packages", "ok", "All base packages are installed.")
    for extra, names in missing.items():
        text = f"The extra '{extra}' is not complete (missing {', '.join(names)}); it is optional."
        yield Finding("packages", "note", text)


def _torch() -> Iterator[Finding]:
    found = _installed("torch")
    if found is None:
        yield Finding("torch", "problem", "torch is not installed; nothing can run without it.")
        return
    wanted = _torch_requirement()
    if wanted and not fits(wanted, found):
        yield Finding("torch", "problem", f"torch is {found}, but Piecework is tested with {wanted}.")
    try:
        import torch
    except Exception as error:
        yield Finding("torch", "problem", f"torch {found} is installed but cannot be imported: {error}.")
        return
    build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for CPU"
    threads = torch.get_num_threads()
    yield Finding("torch", "ok", f"torch is {found}, built {build}, and uses {threads} threads.")


def _torch_requirement() -> str | None:
    try:
        stated = metadata.requires("piecework") or []
    except metadata.PackageNotFoundError:
        return None
    return next((line for line in stated if re.match(r"torch\W", line)), None)


def _processor() -> Iterator[Finding]:
    cores = usable_processors()
    known = _cpu_flags()
    sets = [name for name in INSTRUCTION_SETS if name in known]
    text = (
        f"{platform.machine()} with {cores} usable cores; instruction sets: {', '.join(sets) or 'unknown'}."
    )
    yield Finding("processor", "ok", text)
    limit = os.environ.get("OMP_NUM_THREADS", "")
    if limit.isdigit() and int(limit) < cores:
        text = (
            f"OMP_NUM_THREADS={limit} leaves {cores - int(limit)} cores unused; unset it or give --threads."
        )
        yield Finding("processor", "note", text)
    if platform.machine() in ("x86_64", "AMD64") and known and "avx2" not in known:
        yield Finding("processor", "note", "There is no AVX2; the model will run, slowly.")


def _cpu_flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return set(line[1].split()) if line else set()


def _memory() -> Iterator[Finding]:
    try:
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
    except OSError:
        yield Finding("memory", "note", "Free memory cannot be read on this system; give --kv-cache-memory.")
        return
    values = {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    free, total = values["MemAvailable"], values["MemTotal"]
    level = "ok" if free >= MIN_MEMORY else "problem"
    need = "" if level == "ok" else f"; the default model needs {format_size(MIN_MEMORY)}"
    text = f"{format_size(free)} of {format_size(total)} memory are free{need}."
    yield Finding("memory", level, text)


def _compiler() -> Iterator[Finding]:
    names = [os.environ.get("CXX", ""), "g++", "clang++", "c++"]
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    if found:
        yield Finding("compiler", "ok", f"A C++ compiler is at {found}.")
    else:
        yield Finding("compiler", "note", "There is no C++ compiler; everything runs in torch, slower.")


def _cache(cache_dir: str | None) -> Iterator[Finding]:
    root = Path(cache_dir or os.environ.get("PIECEWORK_CACHE") or Path.home() / ".cache" / "piecework")
    above = next(folder for folder in (root, *root.parents) if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        text = f"The model cache {root} cannot be written; set PIECEWORK_CACHE or --cache-dir."
        yield Finding("cache", "problem", text)
        return
    models = sorted({path.name for path in root.rglob("*.gguf")}) if root.is_dir() else []
    held = f"it holds {', '.join(models)}" if models else "it holds no model yet (piecework pull fetches one)"
    free = format_size(shutil.disk_usage(above).free)
    yield Finding("cache", "ok", f"The model cache is {root}; {held}; {free} of disk are free.")


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def fits(requirement: str, version: str) -> bool:
    """Say whether `version` satisfies a requirement such as `torch>=2.11,<2.14`."""
    try:
        from packaging.requirements import Requirement
    except ImportError:  # a broken installation, which the missing packages explain already
        return True
    return Requirement(requirement).specifier.contains(version, prereleases=True)
