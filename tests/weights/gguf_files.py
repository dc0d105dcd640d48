"""Write GGUF files for tests, with the `gguf` package's writer: the other side of our reader."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from torch import Tensor

Array = npt.NDArray[Any]
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")

_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}


def write_gguf(
    path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, Any]
) -> Path:
    """Write a file. A tensor is a float32 array, or (bytes [rows, row bytes], name of its ggml type)."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, value in tensors.items():
        if isinstance(value, tuple):
            writer.add_tensor(name, value[0], raw_dtype=gguf.GGMLQuantizationType[value[1]])
        else:
            writer.add_tensor(name, np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def interleave(rows: Array, heads: int) -> Array:
    """The order in which llama.cpp's converter writes q and k rows (`permute` in convert_hf_to_gguf.py)."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def model_metadata(config: Any, architecture: str) -> dict[str, Any]:
    """The keys that llama.cpp's converter writes for a `transformers` config."""
    values: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "vocab_size": config.vocab_size,
    }
    head_dim = getattr(config, "head_dim", None)
    if head_dim:
        values |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if architecture == "llama":
        values["rope.dimension_count"] = head_dim or config.hidden_size // config.num_attention_heads
    if architecture == "qwen3moe":
        values |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
    ids = {
        "tokenizer.ggml.bos_token_id": config.bos_token_id,
        "tokenizer.ggml.eos_token_id": config.eos_token_id,
    }
    return {**{f"{architecture}.{k}": v for k, v in values.items()}, **ids}


def model_tensors(model: Any, architecture: str) -> dict[str, Array]:
    """The tensors of a `transformers` model under GGUF's names, q and k interleaved for llama."""
    config, tensors = model.config, {}
    for name, value in _per_expert(model.state_dict()).items():
        if name in _TOP:
            if name != "lm_head.weight" or not config.tie_word_embeddings:
                tensors[_TOP[name]] = value.numpy()
            continue
        _, _, layer, rest = name.split(".", 3)
        stem, kind = rest.rsplit(".", 1)
        own = _LAYER.get(stem) or f"ffn_{stem.rsplit('.', 1)[1].removesuffix('_proj')}_exps"
        array = value.numpy()
        if architecture == "llama" and own in ("attn_q", "attn_k"):
            heads = config.num_attention_heads if own == "attn_q" else config.num_key_value_heads
            array = interleave(array, heads)
        tensors[f"blk.{layer}.{own}.{kind}"] = array
    return tensors


def _per_expert(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Transformers 5 holds gate and up of all experts as one; llama.cpp writes them apart."""
    split: dict[str, Tensor] = {}
    for name, value in state.items():
        if name.endswith("experts.gate_up_proj"):
            gate, up = value.chunk(2, dim=1)
            stem = name.removesuffix("gate_up_proj")
            split |= {f"{stem}gate_proj.weight": gate, f"{stem}up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            split[f"{name}.weight"] = value
        else:
            split[name] = value
    return split


def save_gguf(path: Path, model: Any, architecture: str, **more: Any) -> Path:
    """Write a `transformers` model as a float32 GGUF file; `more` are metadata or tensors (arrays)."""
    arrays = {k: v for k, v in more.items() if isinstance(v, np.ndarray)}
    metadata = {k: v for k, v in more.items() if k not in arrays}
    tensors = {**model_tensors(model, architecture), **arrays}
    return write_gguf(path, architecture, {**model_metadata(model.config, architecture), **metadata}, tensors)
