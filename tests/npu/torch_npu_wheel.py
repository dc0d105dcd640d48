"""Released wheels of torch_npu, read as zip files: without the vendor's driver they can't be imported."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from piecework.cache import cache_root
from piecework.ops.npu.vendor import Function

RELEASES = ("2.6.0.post3", "2.13.0")
SCHEMAS = "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml"
# Where a release makes every function of torch.ops.npu one of torch_npu.
EXPORTS = ("torch_npu/__init__.py", "torch_npu/_init/core/_exports.py")


class NotDownloadable(Exception):
    """There is no such wheel for this Python, or no index that has it."""


def download(release: str) -> Path:
    """Return the wheel of a release, from the cache's folder or from the index that pip is set to."""
    folder = cache_root() / "wheels"
    found = sorted(folder.glob(f"torch_npu-{release}-*.whl"))
    if found:
        return found[0]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        done = subprocess.run(
            [*command, "--dest", temporary, f"torch_npu=={release}"], capture_output=True, text=True
        )
        wheels = sorted(Path(temporary).glob("*.whl"))
        if done.returncode or not wheels:
            reason = (done.stderr or done.stdout).strip().splitlines() or ["pip gave no reason"]
            raise NotDownloadable(reason[-1])
        return wheels[0].replace(folder / wheels[0].name)


class Wheel:
    """The schemas of one release: `text` by the name of a function, and whether torch_npu exports them."""

    def __init__(self, path: Path) -> None:
        with zipfile.ZipFile(path) as wheel:
            sections = yaml.load(wheel.read(SCHEMAS), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
            names = set(wheel.namelist())
            sources = [wheel.read(name).decode() for name in EXPORTS if name in names]
        entries = [entry for part in sections.values() if isinstance(part, list) for entry in part]
        self.text = {
            entry["func"].split("(")[0]: str(entry["func"]) for entry in entries if isinstance(entry, dict)
        }
        self.exported = any("in dir(torch.ops.npu)" in source for source in sources)

    def schema(self, function: str) -> Any:
        """Return the parsed schema; a KeyError where the release has no such function."""
        return torch._C.parse_schema(self.text[function])


def complaints(schemas: Any, functions: Mapping[str, Function]) -> list[str]:
    """Say what of a table is not in a release as it is used."""
    wrong = []
    for name, used in functions.items():
        try:
            schema = schemas.schema(name)
        except KeyError:
            wrong.append(f"{name}: no such function")
            continue
        arguments = {argument.name: argument for argument in schema.arguments}
        order = [argument.name for argument in schema.arguments if not argument.kwarg_only]
        if tuple(order[: len(used.positional)]) != used.positional:
            wrong.append(f"{name}: positional arguments are {order}, not {list(used.positional)}")
        passed = {*used.positional, *used.keywords}
        for keyword in used.keywords:
            if keyword not in arguments:
                wrong.append(f"{name}: no argument {keyword}")
        for argument in schema.arguments:
            if argument.name not in passed and not argument.has_default_value():
                wrong.append(f"{name}: {argument.name} has no default and is not given")
        for argument_name, value in used.defaults.items():
            argument = arguments.get(argument_name)
            if argument is None:
                wrong.append(f"{name}: no argument {argument_name}")
            elif argument.default_value != value:
                wrong.append(
                    f"{name}: the default of {argument_name} is {argument.default_value}, not {value}"
                )
        if len(schema.returns) != used.results:
            wrong.append(f"{name}: {len(schema.returns)} results, not {used.results}")
    return wrong
