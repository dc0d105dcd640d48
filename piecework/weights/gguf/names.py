"""From the tensor names of GGUF files to those of Hugging Face models.

GGUF's names: "Standardized tensor names" in https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import re

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_PATTERN = re.compile(r"blk\.(\d+)\.([a-z_0-9]+)\.(weight|bias)")


def model_name(name: str) -> str | None:
    """The model's name for a tensor; None for one that the model doesn't have or that holds many experts."""
    if name in _TOP:
        return _TOP[name]
    match = _PATTERN.fullmatch(name)
    if match is None or match[2] not in _LAYER:
        return None
    return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"


def expert_names(name: str, num_experts: int) -> list[str] | None:
    """The model's names for a tensor that holds one matrix per expert [E, ...]; None for another tensor."""
    match = _PATTERN.fullmatch(name)
    if match is None or match[2] not in _EXPERTS:
        return None
    stem = f"model.layers.{match[1]}.mlp.experts"
    return [f"{stem}.{e}.{_EXPERTS[match[2]]}.{match[3]}" for e in range(num_experts)]


def turns_halves(name: str) -> bool:
    """Whether llama.cpp interleaves the rows of this tensor (q and k, weight and bias) for a llama model."""
    match = _PATTERN.fullmatch(name)
    return match is not None and match[2] in ("attn_q", "attn_k")
