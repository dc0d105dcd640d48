"""Devices are found by name, and those that lack something say so."""

from __future__ import annotations

import pytest
import torch

from piecework.devices import known_devices, make_device
from piecework.devices.base import Device
from piecework.devices.cuda import CudaDevice, CudaGraph
from piecework.devices.registry import numbered_device
from piecework.errors import CaptureError, ConfigError


def test_devices_by_name():
    assert {"cpu", "cuda", "sim"} <= set(known_devices())
    with pytest.raises(ConfigError, match="device='tpu' is not allowed: one of cpu, cuda"):
        make_device("tpu")
    with pytest.raises(ConfigError, match="device='cpu:3' is not allowed: cpu without options"):
        make_device("cpu:3")
    with pytest.raises(ConfigError, match="device='sim:7' is not allowed: sim or sim:host"):
        make_device("sim:7")
    for name in ("cpu:", "sim:", "cuda:"):
        with pytest.raises(ConfigError, match=f"device='{name}' is not allowed: a name without a colon"):
            make_device(name)


def test_the_cpu_captures_nothing():
    cpu = make_device("cpu")
    assert cpu.graph_modes("decode") == cpu.graph_modes("prefill") == ("eager",)
    with pytest.raises(CaptureError, match="cpu captures no graphs"):
        cpu.new_pool()
    with pytest.raises(CaptureError, match="cpu captures no graphs"):
        cpu.capture(lambda: None, None)
    with pytest.raises(NotImplementedError, match="cpu has no weak references"):
        cpu.weak_reference(torch.zeros(1))
    assert cpu.warm_up(lambda: 3) == 3
    tensor = torch.ones(2)
    assert cpu.place(tensor) is tensor


@pytest.mark.parametrize(
    ("stored", "kernels", "dtype"),
    [
        ("bfloat16", "avx2", torch.bfloat16),
        ("float16", "avx2", torch.bfloat16),
        (None, "avx2", torch.bfloat16),
        ("float32", "avx512_bf16", torch.float32),
        ("blocks", "avx2", torch.float32),
        ("blocks", "avx512", torch.float32),
        ("blocks", "avx512_bf16", torch.bfloat16),
        ("bfloat16", None, torch.float32),
    ],
)
def test_the_precision_that_auto_means_on_the_cpu(
    stored: str | None, kernels: str | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("piecework.devices.cpu.library", lambda: object() if kernels else None)
    monkeypatch.setattr("piecework.devices.cpu.isa", lambda: kernels)
    for feature in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, feature, lambda: False)
    cpu = make_device("cpu")
    assert cpu.default_dtype(stored) == dtype
    assert cpu.keeps_blocks() == (kernels is not None)


def test_cuda_overrides_what_a_device_that_captures_needs():
    needed = {"capture", "weak_reference", "new_pool", "warm_up", "free_memory", "synchronize"}
    assert needed <= set(vars(CudaDevice))
    assert not CudaDevice.__abstractmethods__ and not CudaGraph.__abstractmethods__
    assert issubclass(CudaDevice, Device) and CudaDevice.captures


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_is_refused():
    with pytest.raises(ConfigError, match="device='cuda' is not allowed: a machine with a GPU"):
        make_device("cuda")
    with pytest.raises(ConfigError, match="device='cuda:x' is not allowed: cuda or cuda:<number>"):
        make_device("cuda:x")


@pytest.mark.gpu
def test_cuda_replays_on_recorded_addresses():
    cuda = make_device("cuda")
    x = cuda.zeros((4,), torch.bfloat16)
    cuda.warm_up(lambda: x + 1)
    graph, out = cuda.capture(lambda: x + 1, cuda.new_pool())
    weak = cuda.weak_reference(out)
    x.fill_(2)
    graph.replay()
    cuda.synchronize()
    assert weak.data_ptr() == out.data_ptr() and weak.tolist() == out.tolist() == [3.0] * 4
    with pytest.raises(CaptureError, match="the CUDA capture failed"):
        cuda.capture(lambda: x.sum().item(), cuda.new_pool())
    graph.release()
    with pytest.raises(CaptureError, match="released"):
        graph.replay()


@pytest.mark.parametrize(
    ("name", "offset", "found"),
    [
        ("cuda", 1, "cuda:1"),
        ("cuda:2", 1, "cuda:3"),
        ("npu:0", 0, "npu:0"),
        ("cpu", 1, "cpu"),
        ("sim:host", 2, "sim:host"),
    ],
)
def test_devices_with_numbers_are_counted_on(name: str, offset: int, found: str) -> None:
    assert numbered_device(name, offset) == found
