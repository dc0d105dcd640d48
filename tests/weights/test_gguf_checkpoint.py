"""A model written as GGUF and loaded again is the same model, tensor for tensor and logit for logit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_blocks import random_blocks
from gguf_files import model_metadata, model_tensors, save_gguf, write_gguf
from tiny import tiny_model
from transformers import AutoModelForCausalLM

from piecework.errors import ModelError
from piecework.models.build import build_model
from piecework.models.config import ModelConfig
from piecework.weights.gguf.checkpoint import GgufCheckpoint
from piecework.weights.load import load_weights

PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama", PLAIN),
    "llama tied": ("llama", "llama", {**PLAIN, "tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama biases": ("llama", "llama", {**PLAIN, "attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", "qwen2", {**PLAIN, "use_sliding_window": False}),
    "qwen3": ("qwen3", "qwen3", PLAIN),
    "qwen3moe": ("qwen3_moe", "qwen3moe", {"mlp_only_layers": []}),
}


@pytest.mark.parametrize("case", CASES)
def test_tensors_and_logits_are_the_originals(tmp_path: Path, case: str) -> None:
    name, architecture, changes = CASES[case]
    original = tiny_model(name, **changes)
    checkpoint = GgufCheckpoint(save_gguf(tmp_path / "m.gguf", original, architecture), tmp_path)
    state = original.state_dict()
    for weight in checkpoint.names():
        if ".experts." in weight:
            continue
        out = torch.full(checkpoint.shape(weight), torch.nan)
        checkpoint.read(weight, out)
        assert torch.equal(out, state[weight]), weight
    config = ModelConfig.from_dict(checkpoint.config)
    model = build_model(config, dtype=torch.float32, device="cpu", max_positions=64)
    load_weights(model, checkpoint)
    checkpoint.close()
    ids = torch.randint(0, config.vocab_size, (24,), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        logits = model.head(model(ids, torch.arange(24)))
        expected = original(ids[None]).logits[0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_transformers_reads_the_same_from_the_same_file(tmp_path: Path) -> None:
    tokens = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(320)],
        "tokenizer.ggml.merges": ["t 1"],
    }
    path = save_gguf(tmp_path / "m.gguf", tiny_model("llama", **PLAIN), "llama", **tokens)
    compare_with_transformers(path, tmp_path)


def compare_with_transformers(path: Path, cache: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    checkpoint = GgufCheckpoint(path, cache)
    state = theirs.state_dict()
    if checkpoint.config["tie_word_embeddings"]:
        state.pop("lm_head.weight")
    assert set(checkpoint.names()) == set(state)
    for name, weight in state.items():
        out = torch.empty_like(weight)
        checkpoint.read(name, out)
        assert torch.equal(out, weight), name
    checkpoint.close()


@pytest.mark.slow
def test_the_default_model_is_read_as_transformers_reads_it(default_model: Path, tmp_path: Path) -> None:
    compare_with_transformers(default_model, tmp_path)


def test_quantised_experts_are_slices_of_their_tensor(tmp_path: Path) -> None:
    original = tiny_model("qwen3_moe", mlp_only_layers=[], moe_intermediate_size=32)
    tensors: dict[str, Any] = dict(model_tensors(original, "qwen3moe"))
    raw = random_blocks(np.random.default_rng(0), "Q5_0", (6, 64, 32))
    tensors["blk.2.ffn_down_exps.weight"] = (raw, "Q5_0")
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", model_metadata(original.config, "qwen3moe"), tensors)
    checkpoint = GgufCheckpoint(path, tmp_path)
    from gguf import GGMLQuantizationType, quants

    whole = torch.from_numpy(quants.dequantize(raw, GGMLQuantizationType.Q5_0))
    for expert in range(6):
        name = f"model.layers.2.mlp.experts.{expert}.down_proj.weight"
        assert checkpoint.shape(name) == (64, 32)
        out = torch.empty(64, 32)
        checkpoint.read(name, out)
        assert torch.equal(out, whole[expert])
    checkpoint.close()


def test_types_that_are_not_read_are_named(tmp_path: Path) -> None:
    original = tiny_model("llama", **PLAIN)
    tensors: dict[str, Any] = dict(model_tensors(original, "llama"))
    tensors["blk.1.ffn_up.weight"] = (np.zeros((96, 66), np.uint8), "IQ2_XXS")
    path = write_gguf(tmp_path / "m.gguf", "llama", model_metadata(original.config, "llama"), tensors)
    with pytest.raises(
        ModelError, match=r"m.gguf: .*blk\.1\.ffn_up\.weight \(IQ2_XXS\); supported: F32, F16"
    ):
        GgufCheckpoint(path, tmp_path)


def test_missing_and_strange_tensors_are_reported_together(tmp_path: Path) -> None:
    original = tiny_model("llama", **PLAIN)
    tensors = model_tensors(original, "llama")
    del tensors["blk.1.ffn_up.weight"]
    tensors["blk.0.attn_sinks.weight"] = np.ones(4, np.float32)
    tensors["blk.2.attn_k.weight"] = tensors["blk.2.attn_k.weight"][:, :32]
    path = write_gguf(tmp_path / "m.gguf", "llama", model_metadata(original.config, "llama"), tensors)
    checkpoint = GgufCheckpoint(path, tmp_path)
    config = ModelConfig.from_dict(checkpoint.config)
    model = build_model(config, dtype=torch.float32, device="cpu", max_positions=8)
    with pytest.raises(ModelError) as error:
        load_weights(model, checkpoint)
    text = str(error.value)
    assert str(path) in text
    assert "1 missing:\n  model.layers.1.mlp.up_proj.weight [96, 64]" in text
    assert "1 unexpected:\n  blk.0.attn_sinks.weight [4]" in text
    assert (
        "1 of another shape:\n  model.layers.2.self_attn.k_proj.weight [32, 32], the model has [32, 64]"
        in text
    )
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        checkpoint.read("model.layers.1.mlp.up_proj.weight", torch.empty(96, 64))
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_up\.weight .* has shape \[96, 64\], not \[64, 96\]"):
        checkpoint.read("model.layers.0.mlp.up_proj.weight", torch.empty(64, 96))
    checkpoint.close()


def test_a_file_without_an_embedding_says_so(tmp_path: Path) -> None:
    original = tiny_model("llama", **PLAIN)
    tensors = model_tensors(original, "llama")
    del tensors["token_embd.weight"]
    path = write_gguf(tmp_path / "m.gguf", "llama", model_metadata(original.config, "llama"), tensors)
    with pytest.raises(ModelError, match=r"m.gguf: the tensor token_embd\.weight is missing"):
        GgufCheckpoint(path, tmp_path)
