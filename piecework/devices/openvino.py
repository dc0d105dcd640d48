"""The devices of OpenVINO: pieces run there, attention and everything between pieces on the host."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from piecework.devices.cpu import CpuDevice
from piecework.errors import ConfigError, DeviceError

DEFAULT = "CPU"
_PRECISIONS = {torch.float32: "FP32", torch.bfloat16: "BF16", torch.float16: "FP16"}


@cache
def core() -> Any:
    """Return the one `openvino.Core` of this process. Without the package it is a ConfigError."""
    try:
        import openvino
    except ImportError as error:
        allowed = f"a Python with the package openvino, as piecework[openvino] installs it ({error})"
        raise ConfigError("device", "openvino", allowed) from error
    return openvino.Core()


class OpenVinoDevice(CpuDevice):
    """`openvino:CPU`, `openvino:GPU`, `openvino:NPU`, or another name that OpenVINO has for a device.

    Tensors live on the host, where OpenVINO's plug-ins read and write them. What follows another colon is
    a property of OpenVINO's: `openvino:CPU:NUM_STREAMS=2`.
    """

    name = "openvino"
    compilers = ("openvino", "eager")
    collectives = None
    chains = False
    kv_strategies = ("paged", "static")

    def __init__(self, target: str = DEFAULT, properties: Mapping[str, str] | None = None) -> None:
        self.target = target
        self.name = ":".join(("openvino", target, *(f"{k}={v}" for k, v in (properties or {}).items())))
        self.properties = dict(properties or {})
        # Each compiled model has a packed copy of its weights, and a CPU takes shapes as they come.
        self.open_capacity = target == DEFAULT
        self._check()

    @classmethod
    def from_options(cls, options: str) -> OpenVinoDevice:
        """Read the device's name and its properties; without any it is OpenVINO's CPU."""
        target, *rest = options.split(":") if options else [DEFAULT]
        pairs = [text.partition("=") for text in rest]
        if not target or "=" in target or any(not (key and sign and value) for key, sign, value in pairs):
            allowed = "openvino:<device>, such as CPU, GPU.0 or NPU, and :<PROPERTY>=<value> behind it"
            raise ConfigError("device", f"openvino:{options}", allowed)
        return cls(target, {key: value for key, _, value in pairs})

    def default_dtype(self, stored: str | None = None) -> torch.dtype:
        """Return float32 for weights that are, else the shortest type that the device has in hardware."""
        if stored == "float32":
            return torch.float32
        has = capabilities(self.target)
        wanted = (torch.bfloat16,) if self.target == DEFAULT else (torch.float16, torch.bfloat16)
        return next((dtype for dtype in wanted if _PRECISIONS[dtype] in has), torch.float32)

    def keeps_blocks(self) -> bool:
        """No: there is nothing of OpenVINO's for ops on blocks."""
        return False

    def fingerprint(self) -> str:
        """Return the device's full name, its driver and OpenVINO's version, beside the host's kernels."""
        return " | ".join((super().fingerprint(), *identity(self.target)))

    def default_compiler(self) -> str:
        """Name the compiler that runs pieces on the device."""
        return self.compilers[0]

    def _check(self) -> None:
        """Refuse unknown properties, and a device that isn't there for the reason that its driver gives."""
        if self.target in core().available_devices:
            known = core().get_property(self.target, "SUPPORTED_PROPERTIES")
            for name, value in self.properties.items():
                if name not in known:
                    raise ConfigError("device", f"{name}={value}", "one of " + ", ".join(sorted(known)))
            return
        import openvino
        from openvino import opset15

        x = opset15.parameter([1], openvino.Type.f32)
        try:
            core().compile_model(openvino.Model([opset15.relu(x).output(0)], [x]), self.target)
        except RuntimeError as error:
            raise DeviceError(self.name, "compile", reason(error)) from error


def capabilities(target: str) -> tuple[str, ...]:
    """Return what OpenVINO says that its device `target` computes in: `FP32`, `BF16`, `INT8`, ..."""
    return tuple(core().get_property(target, "OPTIMIZATION_CAPABILITIES"))


def identity(target: str) -> tuple[str, ...]:
    """Return what a compiled model depends on: the device's full name, its driver, OpenVINO's version."""
    import openvino

    has = set(core().get_property(target, "SUPPORTED_PROPERTIES"))
    names = ("FULL_DEVICE_NAME", "DEVICE_ARCHITECTURE", "NPU_DRIVER_VERSION", "NPU_COMPILER_VERSION")
    found = [str(core().get_property(target, name)) for name in names if name in has]
    plugin = core().get_versions(target)
    return (*found, *(v.build_number for v in plugin.values()), openvino.get_version())


def reason(error: BaseException) -> str:
    """Return an error of OpenVINO's in one line, without the places in its sources."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = [line for line in lines if line and not line.startswith("Exception from ")]
    return " ".join(said) or type(error).__name__
