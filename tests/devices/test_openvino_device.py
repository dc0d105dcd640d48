"""OpenVINO's devices by name; those that aren't there say why."""

from __future__ import annotations

import sys

import pytest
import torch

from piecework.compile.registry import make_compiler
from piecework.devices import known_devices, make_device
from piecework.devices.openvino import core
from piecework.errors import ConfigError, DeviceError


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "openvino" in known_devices()
    core.cache_clear()
    monkeypatch.setitem(sys.modules, "openvino", None)
    try:
        with pytest.raises(ConfigError, match=r"package openvino, as piecework\[openvino\] installs it"):
            make_device("openvino:CPU")
        for module in [name for name in sys.modules if name.startswith("piecework.compile.openvino")]:
            monkeypatch.delitem(sys.modules, module)
        with pytest.raises(ConfigError, match=r"compiler='openvino'.*piecework\[openvino\]"):
            make_compiler("openvino")
    finally:
        core.cache_clear()


def test_names_and_properties() -> None:
    pytest.importorskip("openvino", reason="the package openvino is not installed")
    cpu = make_device("openvino:CPU:NUM_STREAMS=2")
    assert (cpu.name, cpu.target, cpu.properties) == (
        "openvino:CPU:NUM_STREAMS=2",
        "CPU",
        {"NUM_STREAMS": "2"},
    )
    assert make_device("openvino").name == "openvino:CPU"
    assert cpu.torch_device.type == "cpu" and not cpu.captures and not cpu.chains
    assert cpu.default_compiler() == "openvino" and cpu.supports_dtype(cpu.default_dtype())
    assert core().get_property("CPU", "FULL_DEVICE_NAME") in cpu.fingerprint()
    for bad in ("openvino:CPU:NUM_STREAMS", "openvino:=3", "openvino:CPU:=2"):
        with pytest.raises(ConfigError, match="openvino:<device>"):
            make_device(bad)
    with pytest.raises(ConfigError, match=r"device='NO_SUCH=1' is not allowed: one of .*NUM_STREAMS"):
        make_device("openvino:CPU:NO_SUCH=1")
    tensor = torch.ones(2)
    assert cpu.place(tensor) is tensor


@pytest.mark.parametrize("target", ["NPU", "GPU", "TPU"])
def test_a_device_that_is_not_there_gives_its_drivers_reason(target: str) -> None:
    pytest.importorskip("openvino", reason="the package openvino is not installed")
    if any(found.startswith(target) for found in core().available_devices):
        pytest.skip(f"this machine has the device {target}")
    with pytest.raises(DeviceError, match=f"device openvino:{target} failed at compile: ") as caught:
        make_device(f"openvino:{target}")
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert (caught.value.device, caught.value.point) == (f"openvino:{target}", "compile")
    assert len(caught.value.reason) > 20 and "\n" not in caught.value.reason
