"""Reading config.json: every form of a field, what HF means by it, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import NAMES, tiny_config, tiny_model

from piecework.errors import ConfigError, ModelError
from piecework.models.config import ModelConfig, RopeConfig

PLAIN: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 256,
}
QWEN = {**PLAIN, "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 8}
MOE = {
    **PLAIN,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


def read(**fields: Any) -> ModelConfig:
    return ModelConfig.from_dict({**PLAIN, **fields})


def test_absent_fields_take_the_defaults_of_transformers() -> None:
    config = ModelConfig.from_dict(PLAIN)
    assert (config.head_dim, config.rms_norm_eps, config.tie_embeddings) == (16, 1e-6, False)
    assert config.rope == RopeConfig(theta=10000.0)
    assert (config.bos_id, config.eos_ids, config.dtype) == (None, (), None)
    assert ModelConfig.from_dict({**PLAIN, "num_key_value_heads": None}).num_kv_heads == 4
    assert ModelConfig.from_dict({**PLAIN, "architectures": ["Qwen3ForCausalLM"]}).head_dim == 128
    assert ModelConfig.from_dict({**PLAIN, "architectures": ["MistralForCausalLM"]}).window(0) == 4096


@pytest.mark.parametrize("name", NAMES)
def test_fields_mean_what_transformers_makes_of_them(name: str) -> None:
    model = tiny_model(name)
    hf = model.config
    config = ModelConfig.from_dict(hf.to_dict())
    assert config.architecture == hf.architectures[0]
    assert config.num_layers == len(model.model.layers)
    for index, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        window = getattr(attention, "sliding_window", getattr(hf, "sliding_window", None))
        assert config.window(index) == (window or 0)
        assert config.is_moe(index) == hasattr(layer.mlp, "experts")
        assert config.qkv_bias == (attention.q_proj.bias is not None)
        assert config.o_bias == (attention.o_proj.bias is not None)
        assert config.qk_norm == hasattr(attention, "q_norm")
        assert attention.q_proj.weight.shape == (config.num_heads * config.head_dim, config.hidden_size)
        assert attention.k_proj.weight.shape == (config.num_kv_heads * config.head_dim, config.hidden_size)


def test_old_and_new_form_of_rope_are_read_alike() -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 64}
    new = read(rope_parameters={"rope_type": "yarn", "rope_theta": 5e5, **scaling})
    old = read(rope_theta=5e5, rope_scaling={"type": "yarn", **scaling})
    assert new.rope == old.rope
    assert old.rope == RopeConfig(theta=5e5, type="yarn", factor=4.0, original_max_position=64)
    inside = read(rope_theta=1.0, rope_parameters={"rope_type": "default", "rope_theta": 7.0})
    assert inside.rope.theta == 7.0
    assert read(rope_scaling=None, rope_theta=9.0).rope == RopeConfig(theta=9.0)


def test_yarn_extends_the_context_where_the_config_did_not() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert read(rope_scaling=scaling).max_position == 1024
    assert read(rope_scaling=scaling, max_position_embeddings=2048).max_position == 2048
    beside = read(rope_scaling={"type": "yarn", "factor": 2.0}, original_max_position_embeddings=100)
    assert beside.rope.original_max_position == 100


def test_windows_by_layer() -> None:
    by_types = {**QWEN, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    assert ModelConfig.from_dict(by_types).windows == (8, 0, 8)
    assert ModelConfig.from_dict({**QWEN, "max_window_layers": 2}).windows == (0, 0, 8)
    assert ModelConfig.from_dict({**QWEN, "use_sliding_window": False}).windows == (0, 0, 0)
    mistral = {**PLAIN, "architectures": ["MistralForCausalLM"]}
    assert ModelConfig.from_dict({**mistral, "sliding_window": None}).windows == (0, 0, 0)
    assert ModelConfig.from_dict({**MOE, "use_sliding_window": True, "sliding_window": 5}).windows == (
        5,
        5,
        5,
    )


def test_moe_layers() -> None:
    config = ModelConfig.from_dict(
        {**MOE, "decoder_sparse_step": 2, "num_hidden_layers": 6, "mlp_only_layers": [3]}
    )
    assert [config.is_moe(layer) for layer in range(6)] == [False, True, False, False, False, True]
    renamed = {k: v for k, v in MOE.items() if k != "num_experts"} | {"num_local_experts": 4}
    assert ModelConfig.from_dict(renamed).num_experts == 4
    assert not ModelConfig.from_dict({**MOE, "num_experts": 0}).is_moe(0)


def test_tokens_and_dtype() -> None:
    config = read(bos_token_id=1, eos_token_id=[2, 7], torch_dtype="bfloat16")
    assert (config.bos_id, config.eos_ids, config.dtype) == (1, (2, 7), "bfloat16")
    assert read(eos_token_id=0, dtype="float16").eos_ids == (0,)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not allowed: silu"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type='dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.rope_type='longrope'"),
        ({"rope_scaling": {"type": "default", "mrope_section": [8, 12]}}, "rope_scaling.mrope_section"),
        ({"use_mrope": True}, "use_mrope=True"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor=None"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "rope_scaling.low_freq_factor=None"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4}},
            "less than high_freq_factor",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": -1}}, "rope_scaling.factor=-1"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5"),
        ({"head_dim": 15}, "head_dim=15"),
        ({"num_key_value_heads": 3}, "a divisor of num_attention_heads, which is 4"),
        ({"hidden_size": 66}, "hidden_size=66"),
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"hidden_size": True}, "hidden_size=True"),
        ({"vocab_size": "many"}, "vocab_size='many'"),
        ({"num_hidden_layers": None}, "num_hidden_layers=None"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps='small'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings=1"),
        ({"eos_token_id": [2, "x"]}, "eos_token_id"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype='float8_e4m3fn'"),
    ],
)
def test_refused_with_the_field_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(**fields)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("base", "fields", "named"),
    [
        (QWEN, {"layer_types": ["full_attention"]}, "for each of 3 layers"),
        (QWEN, {"layer_types": ["chunked_attention"] * 3}, "full_attention or sliding_attention"),
        (QWEN, {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 3}, "full_attention for"),
        (QWEN, {"sliding_window": 0}, "sliding_window=0"),
        (MOE, {"num_experts_per_tok": 5}, "at most num_experts, which is 4"),
        (MOE, {"moe_intermediate_size": None}, "moe_intermediate_size=None"),
        (MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
    ],
)
def test_refused_for_an_architecture(base: dict[str, Any], fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict({**base, **fields})
    assert named in str(caught.value)


@pytest.mark.parametrize("listed", [None, [], ["GPT2LMHeadModel"], "GPT2LMHeadModel", 3])
def test_unknown_architecture_lists_the_known_ones(listed: Any) -> None:
    with pytest.raises(ModelError, match="LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM"):
        read(architectures=listed)


def test_first_known_architecture_is_taken() -> None:
    assert read(architectures=["Unknown", "MistralForCausalLM"]).architecture == "MistralForCausalLM"


def test_config_of_a_real_release_is_read() -> None:
    # The fields of Qwen2.5-0.5B-Instruct's config.json as published.
    config = ModelConfig.from_dict(
        {
            "architectures": ["Qwen2ForCausalLM"],
            "attention_dropout": 0.0,
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "hidden_act": "silu",
            "hidden_size": 896,
            "initializer_range": 0.02,
            "intermediate_size": 4864,
            "max_position_embeddings": 32768,
            "max_window_layers": 21,
            "model_type": "qwen2",
            "num_attention_heads": 14,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.43.1",
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": 151936,
        }
    )
    assert (config.head_dim, config.rope.theta, config.dtype) == (64, 1e6, "bfloat16")
    assert config.qkv_bias and not config.o_bias and config.tie_embeddings
    assert set(config.windows) == {0}


def test_tiny_config_overrides() -> None:
    assert tiny_config("llama", num_hidden_layers=7).num_hidden_layers == 7
