"""A Hugging Face configuration from the metadata of a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from piecework.errors import ModelError
from piecework.weights.gguf.header import Header
from piecework.weights.gguf.special import end_ids, token_id


@dataclass(frozen=True)
class Architecture:
    """What a `general.architecture` stands for. `interleaved`: q and k rows are written interleaved."""

    model_class: str
    model_type: str
    interleaved: bool = False
    experts: bool = False


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", interleaved=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", "qwen3_moe", experts=True),
}

# Llama 3's rope scaling: every model that uses it so far has these three, and a factor of its own.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class _Metadata:
    """The values under the architecture's own prefix."""

    def __init__(self, header: Header) -> None:
        self.header, self.prefix = header, header.architecture

    def get(self, key: str, default: Any = None) -> Any:
        return self.header.metadata.get(f"{self.prefix}.{key}", default)

    def refuse(self, key: str, allowed: str) -> ModelError:
        full = f"{self.prefix}.{key}"
        value = self.header.metadata.get(full)
        return ModelError(f"{self.header.path}: {full}={value!r} is not supported: {allowed}")

    def number(self, key: str, default: float | None = None) -> Any:
        """A number, given once or as the same one for each layer."""
        value = self.get(key, default)
        if isinstance(value, list) and value and len(set(value)) == 1:
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(key, "it has to be one number, the same for all layers")
        return value


def architecture_of(header: Header) -> Architecture:
    """The entry for this file; an unknown architecture is a ModelError that lists the known ones."""
    name = header.architecture
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"{header.path}: general.architecture={name!r} is not supported: one of {known}")
    return ARCHITECTURES[name]


def config_of(header: Header, rope_factors: Sequence[float] | None) -> dict[str, Any]:
    """The config.json that the model of this file would have.

    `rope_factors` [head_dim / 2]: the content of the tensor rope_freqs.weight, where the file has it.
    """
    architecture, meta = architecture_of(header), _Metadata(header)
    if (meta.get("expert_count") or 0) > 0 and not architecture.experts:
        raise meta.refuse("expert_count", "a file without experts for this architecture")
    heads = meta.number("attention.head_count")
    hidden = meta.number("embedding_length")
    head_dim = meta.number("attention.key_length", hidden // heads)
    if meta.number("attention.value_length", head_dim) != head_dim:
        raise meta.refuse("attention.value_length", f"the attention.key_length, {head_dim}")
    names = header.tensors
    config: dict[str, Any] = {
        "architectures": [architecture.model_class],
        "model_type": architecture.model_type,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "num_hidden_layers": meta.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": meta.number("context_length"),
        "vocab_size": _vocab_size(header),
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_gate.bias" in names,
        "rope_parameters": _rope(meta, head_dim, rope_factors),
        "bos_token_id": token_id(header.metadata, "bos"),
        "eos_token_id": end_ids(header.metadata),
    }
    config.update(_feed_forward(meta, architecture))
    config.update(_window(meta, architecture))
    dtype = _dtype(header)
    return config if dtype is None else {**config, "dtype": dtype}


def _vocab_size(header: Header) -> int:
    if "token_embd.weight" not in header.tensors:
        raise ModelError(f"{header.path}: the tensor token_embd.weight is missing")
    return header.tensors["token_embd.weight"].shape[0]


def _feed_forward(meta: _Metadata, architecture: Architecture) -> dict[str, Any]:
    if not architecture.experts:
        return {"intermediate_size": meta.number("feed_forward_length")}
    width = meta.number("expert_feed_forward_length")
    return {
        # No layer is dense, so the width of a dense one means nothing; a file may leave it out.
        "intermediate_size": meta.number("feed_forward_length", width),
        "moe_intermediate_size": width,
        "num_experts": meta.number("expert_count"),
        "num_experts_per_tok": meta.number("expert_used_count"),
        # Not in the file: llama.cpp always normalises the chosen weights (src/models/qwen3moe.cpp).
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _window(meta: _Metadata, architecture: Architecture) -> dict[str, Any]:
    window = meta.get("attention.sliding_window")
    if not window:
        return {"use_sliding_window": False} if architecture.model_type != "llama" else {}
    if architecture.model_type != "llama":
        raise meta.refuse("attention.sliding_window", "0 for this architecture")
    return {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": meta.number("attention.sliding_window"),
    }


def _dtype(header: Header) -> str | None:
    """The float type of the matrices; None where they are quantised."""
    kinds = {info.type for info in header.tensors.values() if len(info.shape) > 1}
    return {0: "float32", 1: "float16", 30: "bfloat16"}.get(kinds.pop()) if len(kinds) == 1 else None


def _rope(meta: _Metadata, head_dim: int, factors: Sequence[float] | None) -> dict[str, Any]:
    """The rope parameters in the form of transformers 5."""
    rope: dict[str, Any] = {"rope_theta": meta.number("rope.freq_base", 10000.0), "rope_type": "default"}
    rotated = meta.number("rope.dimension_count", head_dim)
    if rotated != head_dim:
        rope["partial_rotary_factor"] = rotated / head_dim
    for name in ("rope_factors_long.weight", "rope_factors_short.weight"):
        if name in meta.header.tensors:
            raise ModelError(f"{meta.header.path}: tensor {name} (longrope) is not supported")
    scaling = meta.get("rope.scaling.type", "none")
    linear = meta.get("rope.scale_linear")  # the key of old files
    if scaling == "none" and linear not in (None, 0, 1):
        return {**rope, "rope_type": "linear", "factor": float(linear)}
    if factors is not None and any(abs(f - 1) > 1e-6 for f in factors):
        if scaling != "none":
            raise meta.refuse("rope.scaling.type", "none, in a file that has the tensor rope_freqs.weight")
        return {**rope, **_llama3(meta, rope["rope_theta"], rotated, factors)}
    if scaling == "none":
        return rope
    if scaling not in ("linear", "yarn"):
        raise meta.refuse("rope.scaling.type", "none, linear or yarn")
    factor = float(meta.number("rope.scaling.factor"))
    if scaling == "linear":
        return {**rope, "rope_type": "linear", "factor": factor}
    return {**rope, **_yarn(meta, factor)}


def _yarn(meta: _Metadata, factor: float) -> dict[str, Any]:
    yarn: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    yarn["original_max_position_embeddings"] = meta.number("rope.scaling.original_context_length")
    for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if meta.get(f"rope.scaling.{theirs}") is not None:
            yarn[ours] = float(meta.number(f"rope.scaling.{theirs}"))
    if meta.number("rope.scaling.yarn_ext_factor", 1.0) != 1:
        raise meta.refuse("rope.scaling.yarn_ext_factor", "1")
    # llama.cpp multiplies this into YaRN's own 0.1 ln(factor) + 1; transformers wants the product.
    attn_factor = float(meta.number("rope.scaling.attn_factor", 1.0))
    if attn_factor != 1:
        yarn["attention_factor"] = attn_factor * (0.1 * math.log(factor) + 1)
    return yarn


def _llama3(meta: _Metadata, theta: float, rotated: int, factors: Sequence[float]) -> dict[str, Any]:
    """Llama 3's scaling, of which a file has only the result: by how much each frequency is divided.

    The formula is transformers' `_compute_llama3_parameters`; the result has to come out as in the file.
    """
    rope = {"rope_type": "llama3", "factor": float(max(factors)), **_LLAMA3}
    low, high, length = (_LLAMA3[k] for k in _LLAMA3)
    for i, found in enumerate(factors):
        wavelength = 2 * math.pi * theta ** (2 * i / rotated)
        smooth = min(1.0, max(0.0, (length / wavelength - low) / (high - low)))
        expected = 1 / ((1 - smooth) / rope["factor"] + smooth)
        if len(factors) * 2 != rotated or abs(found - expected) > 1e-3 * expected:
            raise ModelError(
                f"{meta.header.path}: tensor rope_freqs.weight is not supported: "
                f"it isn't Llama 3's rope scaling of a context of {length}"
            )
    return rope
