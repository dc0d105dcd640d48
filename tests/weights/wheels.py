"""Wheels made by hand, and pip pointed at a folder of them, so that tests fetch without a network."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest


def make_wheel(folder: Path, name: str, version: str, files: Mapping[str, bytes]) -> Path:
    """Write a wheel that pip accepts, with the given members."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name.replace('-', '_')}-{version}"
    metadata = {
        f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{stem}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{stem}.dist-info/RECORD": "",
    }
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for member, content in files.items():
            wheel.writestr(zipfile.ZipInfo(member), content)
        for member, text in metadata.items():
            wheel.writestr(member, text)
    return path


def pip_environment(folder: Path) -> dict[str, str]:
    """Environment variables that make pip look into `folder` and nowhere else."""
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def use_folder(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Point pip at `folder` for the length of a test."""
    for name, value in pip_environment(folder).items():
        monkeypatch.setenv(name, value)
