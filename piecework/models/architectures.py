"""What is special about each architecture, by the name that config.json lists under `architectures`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from piecework.errors import ModelError


@dataclass(frozen=True)
class Architecture:
    """How an architecture reads its config.json, and where its class is.

    Attributes:
        module: the module of `piecework.models` with the class.
        qkv_bias, o_bias: whether the projections have biases; None: as the field `attention_bias` says.
        mlp_bias: likewise, as the field `mlp_bias` says.
        qk_norm: queries and keys are normalised per head.
        windows: sliding windows on no layer, on all, on all where `use_sliding_window` is set, or
            then by layer (`layer_types`, or from `max_window_layers` on).
        head_dim: used where the config gives none; None: hidden_size / num_attention_heads.
        moe: some layers have routed experts.
    """

    module: str
    qkv_bias: bool | None = False
    o_bias: bool | None = False
    mlp_bias: bool | None = False
    qk_norm: bool = False
    windows: Literal["none", "all", "switched", "by_layer"] = "none"
    head_dim: int | None = None
    moe: bool = False


ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture("llama", qkv_bias=None, o_bias=None, mlp_bias=None),
    "MistralForCausalLM": Architecture("mistral", windows="all"),
    "Qwen2ForCausalLM": Architecture("qwen2", qkv_bias=True, windows="by_layer"),
    "Qwen3ForCausalLM": Architecture(
        "qwen3", qkv_bias=None, o_bias=None, qk_norm=True, windows="by_layer", head_dim=128
    ),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3_moe", qkv_bias=None, o_bias=None, qk_norm=True, windows="switched", moe=True
    ),
}


def known_architectures() -> tuple[str, ...]:
    """Return the names of the architectures that can be served, sorted."""
    return tuple(sorted(ARCHITECTURES))


def pick(listed: Any) -> str:
    """Return the first known name of config.json's `architectures`; `ModelError` if there is none."""
    names = [listed] if isinstance(listed, str) else listed
    for name in names if isinstance(names, list | tuple) else ():
        if name in ARCHITECTURES:
            return str(name)
    known = ", ".join(known_architectures())
    raise ModelError(f"architectures={listed!r} is not supported; known: {known}")
