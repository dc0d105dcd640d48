"""Models of the check: folders with a config.json alone, for random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "max_position_embeddings": 4096,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
}
_TINY_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 24,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
# The shape of Qwen3-0.6B (its config.json on the Hugging Face hub).
_SMALL = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
# Likewise of Qwen3-8B.
_LARGE = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny-qwen3": {**_QWEN3, **_TINY},
    "tiny-llama": {**_QWEN3, **_TINY, "architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "tiny-qwen3-moe": {**_QWEN3, **_TINY, **_TINY_MOE},
    "qwen3-0.6b": {**_QWEN3, **_SMALL},
    "qwen3-8b": {**_QWEN3, **_LARGE},
}


def write_shape(folder: Path, name: str) -> str:
    """Write the config.json of a shape into `folder`/`name`, and return that path."""
    target = folder / name
    target.mkdir(exist_ok=True)
    (target / "config.json").write_text(json.dumps(SHAPES[name]))
    return str(target)
