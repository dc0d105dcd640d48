"""Building models: the registry, allocation, and that a model instance keeps no shared state."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest
import torch
from dense_kv import DenseKV
from hf_weights import copy_weights
from tiny import NAMES, tiny_config, tiny_model

from piecework.errors import ConfigError, ModelError
from piecework.layers.linear import PackedLinear
from piecework.models.build import build_model
from piecework.models.config import ModelConfig
from piecework.models.decoder import CausalLM
from piecework.models.registry import known_architectures, model_class


def build(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> CausalLM:
    config = ModelConfig.from_dict(tiny_config(name).to_dict())
    return build_model(config, dtype=dtype, device=device, max_positions=50)


def loaded(name: str) -> CausalLM:
    model = build(name)
    copy_weights(model, tiny_model(name).state_dict())
    return model


def test_registry_finds_every_known_class() -> None:
    for name in known_architectures():
        assert model_class(name).__name__ == name
        assert issubclass(model_class(name), CausalLM)


def test_registry_lists_the_known_ones() -> None:
    with pytest.raises(
        ModelError, match=r"'FalconForCausalLM' is not supported; known: .*Qwen3MoeForCausalLM"
    ):
        model_class("FalconForCausalLM")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameters_have_the_dtype_and_device_asked_for(name: str, device: str) -> None:
    model = build(name, torch.bfloat16, device)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {device}
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    buffers = dict(model.named_buffers())
    assert list(buffers) == ["model.rotary.cos_sin"]
    table = buffers["model.rotary.cos_sin"]
    assert (table.dtype, tuple(table.shape)) == (torch.float32, (50, model.config.rotary_dim))
    assert "model.rotary.cos_sin" not in model.state_dict()


def test_tied_head_has_no_parameter_and_uses_the_embedding() -> None:
    model = loaded("qwen2")
    assert "lm_head.weight" not in dict(model.named_parameters())
    rows = torch.randn(3, model.config.hidden_size)
    torch.testing.assert_close(model.head(rows), rows @ model.model.embed_tokens.weight.T)
    assert "lm_head.weight" in dict(build("llama").named_parameters())


def test_packed_modules_name_the_parts_in_row_order() -> None:
    model = build("qwen3_moe")
    found = {n.rsplit(".", 1)[1]: m for n, m in model.named_modules() if isinstance(m, PackedLinear)}
    assert set(found) == set(model.packed_modules)
    for name, module in found.items():
        assert len(module.sizes) == len(model.packed_modules[name])
        assert sum(module.sizes) == module.weight.shape[0]
    assert found["qkv_proj"].sizes == (4 * 32, 2 * 32, 2 * 32)


def test_building_touches_no_parameter_memory() -> None:
    base = ModelConfig.from_dict(tiny_config("llama").to_dict())
    config = replace(
        base, windows=(), hidden_size=2048, intermediate_size=8192, num_layers=24, num_heads=32, head_dim=64
    )
    build("llama")
    process = psutil.Process()
    before, started = process.memory_info().rss, time.process_time()
    model = build_model(config, dtype=torch.bfloat16, device="cpu", max_positions=4096)
    taken, grown = time.process_time() - started, process.memory_info().rss - before
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    assert size > 2**31
    assert grown < size / 20
    assert taken < 5


def test_max_positions_is_checked() -> None:
    config = ModelConfig.from_dict(tiny_config("llama").to_dict())
    with pytest.raises(ConfigError, match="max_positions=0"):
        build_model(config, dtype=torch.float32, device="cpu", max_positions=0)


@pytest.mark.parametrize("name", NAMES)
def test_unbound_attention_is_one_causal_sequence(name: str) -> None:
    model = loaded(name)
    ids, positions = torch.randint(0, 320, (23,)), torch.arange(23)
    plain = model(ids, positions)
    model.bind_attention(DenseKV(model.attention_specs))
    torch.testing.assert_close(model(ids, positions), plain, rtol=1e-4, atol=1e-4)
    model.bind_attention(None)
    torch.testing.assert_close(model(ids, positions), plain, rtol=0, atol=0)


def test_instances_share_nothing() -> None:
    one, two = loaded("llama"), loaded("llama")
    calls: list[str] = []
    one.bind_attention(lambda layer, q, k, v, out: calls.append(f"a{layer}"))
    two.bind_attention(lambda layer, q, k, v, out: calls.append(f"b{layer}"))
    one(torch.arange(2), torch.arange(2))
    two(torch.arange(2), torch.arange(2))
    assert calls == ["a0", "a1", "a2", "b0", "b1", "b2"]


def test_padded_rows_reach_no_expert_and_change_nothing() -> None:
    model = loaded("qwen3_moe")
    specs = model.attention_specs
    ids, positions = torch.arange(6), torch.arange(6)
    alone = model(ids[:4], positions[:4])

    def first_four(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        DenseKV(specs)(layer, q[:4], k[:4], v[:4], out[:4])
        out[4:] = float("nan")

    model.bind_attention(first_four)
    padded = model(ids, positions, torch.tensor([4]))
    torch.testing.assert_close(padded[:4], alone, rtol=1e-4, atol=1e-4)


def test_config_and_registry_need_no_torch() -> None:
    code = (
        "import sys, piecework.models.config, piecework.models.registry;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
