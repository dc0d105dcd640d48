"""A GGUF file's metadata gives the configuration of the model that it was made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_blocks import random_blocks
from gguf_files import save_gguf, write_gguf
from tiny import tiny_model
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from piecework.errors import ModelError
from piecework.models.config import ModelConfig
from piecework.weights.gguf.checkpoint import GgufCheckpoint

MINIMAL: dict[str, Any] = {
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 48,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
EMBEDDING = {"token_embd.weight": np.ones((10, 32), np.float32)}


def config_with(tmp_path: Path, tensors: dict[str, Any] | None = None, **values: Any) -> dict[str, Any]:
    metadata = {**MINIMAL, **{f"llama.{k.replace('__', '.')}": v for k, v in values.items()}}
    path = write_gguf(tmp_path / "m.gguf", "llama", metadata, {**EMBEDDING, **(tensors or {})})
    checkpoint = GgufCheckpoint(path, tmp_path / "cache")
    checkpoint.close()
    return checkpoint.config


@pytest.mark.parametrize(
    ("name", "architecture", "changes"),
    [
        ("llama", "llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        ("qwen2", "qwen2", {"use_sliding_window": False, "rope_parameters": {"rope_theta": 1e6}}),
        ("qwen3", "qwen3", {"rope_parameters": {"rope_theta": 1e6}}),
        ("qwen3_moe", "qwen3moe", {"mlp_only_layers": []}),
    ],
)
def test_the_config_says_what_the_original_says(
    tmp_path: Path, name: str, architecture: str, changes: dict[str, Any]
) -> None:
    model = tiny_model(name, **changes)
    path = save_gguf(tmp_path / "m.gguf", model, architecture)
    checkpoint = GgufCheckpoint(path, tmp_path / "cache")
    ours = ModelConfig.from_dict(checkpoint.config)
    theirs = ModelConfig.from_dict(model.config.to_dict())
    assert ours.rms_norm_eps == pytest.approx(theirs.rms_norm_eps, rel=1e-6)
    same = {"rms_norm_eps": 1e-5, "dtype": None}  # the file names no precision: its matrices are mixed
    assert {**vars(ours), **same} == {**vars(theirs), **same}
    assert checkpoint.generation_config == {"bos_token_id": 1, "eos_token_id": [2]}
    checkpoint.close()


def test_defaults_of_a_minimal_file(tmp_path: Path) -> None:
    config = config_with(tmp_path)
    assert config["num_key_value_heads"] == 4 and config["head_dim"] == 8
    assert config["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "default"}
    assert config["vocab_size"] == 10 and config["tie_word_embeddings"] is True
    assert config["eos_token_id"] == [] and config["bos_token_id"] is None
    assert config["dtype"] == "float32"


def test_biases_a_head_and_quantised_types_show_in_the_tensors(tmp_path: Path) -> None:
    blocks = random_blocks(np.random.default_rng(0), "Q8_0", (10, 32))
    bias = np.ones(4, np.float32)
    extra = {"blk.0.attn_q.bias": bias, "blk.0.ffn_gate.bias": bias, "output.weight": (blocks, "Q8_0")}
    config = config_with(tmp_path, extra)
    assert config["attention_bias"] is True and config["mlp_bias"] is True
    assert config["tie_word_embeddings"] is False
    assert "dtype" not in config


def test_one_value_for_each_layer_has_to_be_the_same(tmp_path: Path) -> None:
    assert config_with(tmp_path, attention__head_count_kv=[2, 2])["num_key_value_heads"] == 2
    with pytest.raises(ModelError, match=r"head_count_kv=\[2, 4\] is not supported: .*the same for all"):
        config_with(tmp_path, attention__head_count_kv=[2, 4])


def test_a_window_makes_it_mistral(tmp_path: Path) -> None:
    config = ModelConfig.from_dict(config_with(tmp_path, attention__sliding_window=16))
    assert config.architecture == "MistralForCausalLM" and config.windows == (16,)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"rope__scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"rope__scaling__type": "linear", "rope__scaling__factor": 2.0},
            {"rope_type": "linear", "factor": 2.0},
        ),
        (
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__original_context_length": 32,
                "rope__scaling__attn_factor": 2.0,
                "rope__scaling__yarn_beta_fast": 16.0,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 16.0,
                "attention_factor": pytest.approx(2 * 1.1386294),
            },
        ),
        ({"rope__dimension_count": 4}, {"rope_type": "default", "partial_rotary_factor": 0.5}),
        ({"rope__scaling__type": "none"}, {"rope_type": "default"}),
    ],
)
def test_rope_scaling(tmp_path: Path, values: dict[str, Any], expected: dict[str, Any]) -> None:
    config = config_with(tmp_path, **values)
    assert config["rope_parameters"] == {"rope_theta": 10000.0, **expected}
    ModelConfig.from_dict(config)


def llama3_factors(theta: float, factor: float, head_dim: int = 8, length: int = 8192) -> np.ndarray:
    """What llama.cpp's converter writes: by how much transformers' llama3 scaling divides each frequency."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": length,
    }
    config = LlamaConfig(head_dim=head_dim, rope_parameters=rope, max_position_embeddings=131072)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = theta ** -(torch.arange(0, head_dim, 2) / head_dim)
    return (plain / scaled).numpy()


@pytest.mark.parametrize(("theta", "factor"), [(500000.0, 8.0), (500000.0, 32.0), (10000.0, 8.0)])
def test_rope_factors_of_llama3_are_recognised(tmp_path: Path, theta: float, factor: float) -> None:
    factors = llama3_factors(theta, factor, head_dim=64)
    assert factors.min() == pytest.approx(1) and factors.max() == pytest.approx(factor)
    tensors = {"rope_freqs.weight": factors}
    config = config_with(tmp_path, tensors, rope__freq_base=theta, attention__key_length=64,
                         attention__value_length=64)  # fmt: skip
    assert config["rope_parameters"] == {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": pytest.approx(factor),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_rope_factors_of_one_mean_nothing(tmp_path: Path) -> None:
    config = config_with(tmp_path, {"rope_freqs.weight": np.ones(4, np.float32)})
    assert config["rope_parameters"]["rope_type"] == "default"


@pytest.mark.parametrize(
    ("tensors", "values", "message"),
    [
        ({"rope_freqs.weight": np.array([1, 2, 3, 4], np.float32)}, {}, "tensor rope_freqs.weight is not"),
        ({"rope_freqs.weight": np.array([1, 2], np.float32)}, {}, "tensor rope_freqs.weight is not"),
        (
            {"rope_freqs.weight": llama3_factors(10000.0, 8.0, length=512)},
            {},
            "it isn't Llama 3's rope scaling of a context of 8192",
        ),
        ({"rope_factors_long.weight": np.ones(4, np.float32)}, {}, "rope_factors_long.weight"),
        (
            {},
            {"rope__scaling__type": "longrope"},
            "llama.rope.scaling.type='longrope' is not supported: none,",
        ),
        ({}, {"rope__scaling__type": "yarn"}, "llama.rope.scaling.factor=None"),
        ({}, {"expert_count": 8}, "llama.expert_count=8 is not supported"),
        ({}, {"attention__value_length": 4}, "llama.attention.value_length=4"),
        ({}, {"block_count": "two"}, "llama.block_count='two'"),
        ({}, {"split__count": 3}, None),
    ],
)
def test_what_the_model_could_not_honour_is_refused_by_name(
    tmp_path: Path, tensors: dict[str, Any], values: dict[str, Any], message: str | None
) -> None:
    if message is None:  # a key outside the architecture's own
        path = write_gguf(tmp_path / "m.gguf", "llama", {**MINIMAL, "split.count": 3}, EMBEDDING)
        with pytest.raises(ModelError, match="one of 3 parts of a split file"):
            GgufCheckpoint(path, tmp_path)
        return
    with pytest.raises(ModelError) as error:
        config_with(tmp_path, tensors, **values)
    assert message in str(error.value) and "m.gguf" in str(error.value)


@pytest.mark.parametrize("missing", sorted(MINIMAL))
def test_a_missing_key_is_named(tmp_path: Path, missing: str) -> None:
    path = write_gguf(
        tmp_path / "m.gguf", "llama", {k: v for k, v in MINIMAL.items() if k != missing}, EMBEDDING
    )
    with pytest.raises(ModelError, match=missing):
        GgufCheckpoint(path, tmp_path)


def test_an_unknown_architecture_lists_the_known_ones(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "mamba", {}, EMBEDDING)
    with pytest.raises(ModelError) as error:
        GgufCheckpoint(path, tmp_path)
    assert "general.architecture='mamba' is not supported: one of llama, qwen2, qwen3, qwen3moe" in str(
        error.value
    )


def test_a_file_without_an_architecture_says_so(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", {}, EMBEDDING)
    path.write_bytes(path.read_bytes().replace(b"general.architecture", b"general.architectXre"))
    with pytest.raises(ModelError, match=r"no general\.architecture"):
        GgufCheckpoint(path, tmp_path)


def test_a_window_of_qwen_is_refused(tmp_path: Path) -> None:
    path = save_gguf(
        tmp_path / "m.gguf", tiny_model("qwen3"), "qwen3", **{"qwen3.attention.sliding_window": 8}
    )
    with pytest.raises(ModelError, match=r"qwen3.attention.sliding_window=8 is not supported"):
        GgufCheckpoint(path, tmp_path)
