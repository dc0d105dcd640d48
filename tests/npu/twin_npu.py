"""The stand-in `torch_npu` as a fixture: import it from a conftest, and the device `npu` is there."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import fake_torch_npu
import pytest
import torch

from piecework.devices.npu import NpuDevice
from piecework.ops import npu as npu_ops
from piecework.ops.npu import heads

FOLDER = Path(__file__).parent / "twin"
_loaded: dict[str, ModuleType] = {}


def load() -> dict[str, ModuleType]:
    """Import the stand-in, once, since its operations can be registered once, and hide it again."""
    if not _loaded:
        sys.path.insert(0, str(FOLDER))
        try:
            importlib.import_module("torch_npu")
        finally:
            sys.path.remove(str(FOLDER))
        for name in [name for name in sys.modules if name.partition(".")[0] == "torch_npu"]:
            _loaded[name] = sys.modules.pop(name)
    return _loaded


@pytest.fixture
def twin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Put the stand-in where torch_npu would be; gives its NPU, which is new."""
    modules = load()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(heads, "ascend_triton", lambda: False)
    machine = modules["torch_npu._machine"]
    made = machine.reset()
    # CPU tensors have one device, wherever they lie.
    monkeypatch.setattr(NpuDevice, "holds", lambda self, tensor: machine.machine().memory.holds(tensor))
    yield made
    machine.reset()


@pytest.fixture
def float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the functions that take half types alone take float32 too, so that tokens can be compared."""
    widened = (*npu_ops.quantize.HALVES, torch.float32)
    for module in vars(npu_ops).values():
        if isinstance(module, ModuleType) and hasattr(module, "HALVES"):
            monkeypatch.setattr(module, "HALVES", widened)
    monkeypatch.setattr(fake_torch_npu, "TYPES", [*fake_torch_npu.TYPES, torch.float32])
