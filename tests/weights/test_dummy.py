"""Dummy weights depend on the seed and the name alone, and are of a size that keeps activations sane."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from gguf_files import save_gguf
from tiny import NAMES, save_tiny, tiny_config, tiny_model

from piecework.models.build import build_model
from piecework.models.config import ModelConfig
from piecework.weights.dummy import STEP, DummyCheckpoint
from piecework.weights.load import load_weights, open_checkpoint
from piecework.weights.source import Source


def dummy(seed: int = 0) -> DummyCheckpoint:
    return DummyCheckpoint({}, {}, seed, "here")


def draw(name: str, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.full(shape, torch.nan, dtype=dtype)
    dummy(seed).read(name, out)
    return out


def test_a_weight_depends_on_seed_and_name_only() -> None:
    checkpoint = dummy()
    first = torch.empty(50, 40)
    checkpoint.read("a.weight", torch.empty(3, 3))
    checkpoint.read("b.weight", first)
    assert torch.equal(first, draw("b.weight", 50, 40))
    assert not torch.equal(first, draw("c.weight", 50, 40))
    assert not torch.equal(first, draw("b.weight", 50, 40, seed=1))
    assert torch.equal(first.to(torch.bfloat16), draw("b.weight", 50, 40, dtype=torch.bfloat16))


def test_the_numbers_stay_the_same_from_release_to_release() -> None:
    # Benchmarks and tests are compared across versions; torch's CPU generator is stable too.
    numbers = (draw("model.layers.0.mlp.up_proj.weight", 4, 16, seed=7) * 2**12).round().to(torch.int32)
    digest = hashlib.sha256(numbers.numpy().tobytes()).hexdigest()
    assert digest[:16] == "1c464e984b36aa39"


@pytest.mark.parametrize(
    ("name", "shape", "mean", "deviation"),
    [
        ("model.layers.0.mlp.up_proj.weight", (300, 400), 0.0, 0.05),
        ("model.embed_tokens.weight", (2000, 100), 0.0, 0.1),
        ("model.layers.0.input_layernorm.weight", (50_000,), 1.0, 0.02),
        ("model.layers.0.self_attn.q_proj.bias", (50_000,), 0.0, 0.02),
        ("large.weight", (3, STEP), 0.0, STEP**-0.5),
    ],
)
def test_the_size_of_weights(name: str, shape: tuple[int, ...], mean: float, deviation: float) -> None:
    values = draw(name, *shape)
    assert values.mean().item() == pytest.approx(mean, abs=deviation / 20)
    assert values.std().item() == pytest.approx(deviation, rel=0.02)


@pytest.mark.parametrize("name", NAMES)
def test_a_config_is_enough_for_a_model_that_runs(tmp_path: Path, name: str) -> None:
    config = tiny_config(name)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    models = []
    for seed in (0, 0, 1):
        checkpoint = open_checkpoint(Source("folder", tmp_path), "dummy", seed)
        of_model = ModelConfig.from_dict(checkpoint.config)
        model = build_model(of_model, dtype=torch.float32, device="cpu", max_positions=32)
        load_weights(model, checkpoint)
        models.append(model)
    with torch.inference_mode():
        ids, positions = torch.arange(20), torch.arange(20)
        logits = [model.head(model(ids, positions)) for model in models]
    assert torch.equal(logits[0], logits[1]) and not torch.equal(logits[0], logits[2])
    assert logits[0].isfinite().all() and 0.1 < logits[0].std() < 10


def test_a_packed_weight_is_made_of_its_parts(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen2")
    checkpoint = open_checkpoint(Source("folder", tmp_path), "dummy", 3)
    config = ModelConfig.from_dict(checkpoint.config)
    model = build_model(config, dtype=torch.float32, device="cpu", max_positions=8)
    load_weights(model, checkpoint)
    q, k, v = model.model.layers[1].self_attn.qkv_proj.weight.split([64, 32, 32])
    for part, name in ((q, "q_proj"), (k, "k_proj"), (v, "v_proj")):
        assert torch.equal(part, draw(f"model.layers.1.self_attn.{name}.weight", *part.shape, seed=3))


def test_a_gguf_file_gives_its_config(tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "m.gguf", tiny_model("qwen3"), "qwen3")
    checkpoint = open_checkpoint(Source("gguf", path), "dummy", cache_dir=tmp_path)
    assert isinstance(checkpoint, DummyCheckpoint)
    assert checkpoint.config["architectures"] == ["Qwen3ForCausalLM"]
    assert checkpoint.generation_config["eos_token_id"] == [2]
    assert checkpoint.names() == []
    with pytest.raises(KeyError, match="in any shape"):
        checkpoint.shape("x")
