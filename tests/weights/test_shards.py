"""The ranks' shares of a model, added up in one process, are the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf_blocks import encode
from gguf_files import model_metadata, model_tensors, write_gguf
from hypothesis import given
from hypothesis import strategies as st
from shards import check_shares, load_share
from tiny import save_tiny, tiny_config, tiny_model

from piecework.errors import ConfigError
from piecework.models.config import ModelConfig
from piecework.models.shard import Shard, allowed_sizes, check_size, shard_config

UNEVEN = {
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "vocab_size": 322,
    "intermediate_size": 97,
}
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("llama", 2, {"attention_bias": True, "mlp_bias": True}),
    ("llama", 3, UNEVEN),
    ("qwen2", 4, {}),
    ("qwen3", 2, {"num_key_value_heads": 1}),
    ("qwen3_moe", 2, {}),
]


@pytest.mark.parametrize(("name", "size", "changes"), CASES)
def test_shares_of_float_models(tmp_path: Path, name: str, size: int, changes: dict[str, Any]) -> None:
    check_shares(save_tiny(tmp_path, name, **changes), size)


def test_shares_of_dummy_weights(tmp_path: Path) -> None:
    check_shares(save_tiny(tmp_path, "qwen3_moe", mlp_only_layers=[]), 2, load_format="dummy")


def in_blocks(path: Path, **sizes: int) -> Path:
    """A tiny Llama in blocks of 32 channels."""
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    model = tiny_model("llama", hidden_size=128, intermediate_size=128, **plain, **sizes)
    tensors = {
        name: (encode(value, "Q4_0"), "Q4_0") if value.ndim > 1 else value
        for name, value in model_tensors(model, "llama").items()
    }
    return write_gguf(path, "llama", model_metadata(model.config, "llama"), tensors)


@pytest.mark.parametrize("quantization", ["gguf", "none"])
def test_shares_of_blocks(tmp_path: Path, quantization: str) -> None:
    check_shares(in_blocks(tmp_path / "m.gguf", tie_word_embeddings=True), 2, quantization=quantization)


def test_a_block_is_not_cut(tmp_path: Path) -> None:
    path = in_blocks(tmp_path / "m.gguf", head_dim=24, num_attention_heads=8, num_key_value_heads=8)
    check_shares(path, 2, quantization="gguf")
    with pytest.raises(
        ConfigError, match=r"o_proj.weight whole blocks of 32 channels, of 192 .* quantization"
    ):
        load_share(path, Shard(0, 4), "gguf")
    check_shares(path, 4, quantization="none")


def test_sizes_that_do_not_divide_the_heads_are_refused() -> None:
    fields = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    config = ModelConfig.from_dict(tiny_config("llama", **fields).to_dict())
    assert allowed_sizes(config) == (1, 3, 9)
    with pytest.raises(ConfigError) as error:
        check_size(config, 2)
    assert error.value.field == "tensor_parallel_size" and error.value.value == 2
    for part in ("9 heads", "3 kv heads", "one of 1, 3, 9"):
        assert part in str(error.value)
    assert shard_config(config, Shard(8, 9)).num_kv_heads == 1


@given(st.integers(1, 12), st.integers(1, 400))
def test_parts_are_all_of_it(size: int, count: int) -> None:
    shards = [Shard(rank, size) for rank in range(size)]
    assert [i for shard in shards for i in shard.part(count)] == list(range(count))
    rows = [i for shard in shards for i in shard.rows(count)]
    assert rows[:count] == list(range(count)) and len({len(shard.rows(count)) for shard in shards}) == 1
    if size % count == 0 or count % size == 0:
        assert sorted({i for shard in shards for i in shard.heads(count)}) == list(range(count))
