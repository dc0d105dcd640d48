"""The shape of a model, read from a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from piecework.models.architectures import ARCHITECTURES, Architecture, pick
from piecework.models.fields import Fields
from piecework.models.rope_config import RopeConfig, read_rope
from piecework.models.shard import Shard

__all__ = ["ModelConfig", "RopeConfig"]

DTYPES = ("float32", "bfloat16", "float16")
# What transformers' MistralConfig and Qwen configs take where `sliding_window` is absent.
DEFAULT_WINDOW = 4096


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only model. Sizes are counts of channels, heads, layers, tokens or experts.

    Attributes:
        architecture: the class's name in config.json.
        intermediate_size: of a dense MLP; `moe_intermediate_size` of one expert.
        max_position: the longest context, in tokens; yarn's extension is included.
        windows: per layer how many tokens attention sees, the token itself among them; 0 is all.
        num_experts: 0 for a dense model. `is_moe` says which layers have experts.
        dtype: the precision that the checkpoint states, None where it states none.
        bos_id, eos_ids: first and end tokens, as far as config.json gives them.
        shard: which part of the model these heads and channels are; the vocabulary is always the whole one.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    rope: RopeConfig = field(default_factory=RopeConfig)
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    windows: tuple[int, ...] = ()
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    dtype: str | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    shard: Shard = field(default_factory=Shard)

    @property
    def rotary_dim(self) -> int:
        """Channels of each head that are rotated."""
        return int(self.head_dim * self.rope.partial_factor)

    def window(self, layer: int) -> int:
        """Return the sliding window of `layer`; 0 is none."""
        return self.windows[layer] if self.windows else 0

    def is_moe(self, layer: int) -> bool:
        """Say whether `layer` has routed experts in place of a dense MLP."""
        sparse = self.num_experts > 0 and (layer + 1) % self.decoder_sparse_step == 0
        return sparse and layer not in self.mlp_only_layers

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """Read a config.json that was parsed into a dictionary.

        Raises:
            ModelError: the architecture is unknown.
            ConfigError: a field is missing, wrong, or asks for something that is not supported.
        """
        architecture = pick(values.get("architectures"))
        traits = ARCHITECTURES[architecture]
        config = Fields(values)
        _refuse(config)
        max_position = config.integer("max_position_embeddings")
        rope = read_rope(config, max_position)
        attention_bias = config.flag("attention_bias")
        built = cls(
            architecture=architecture,
            max_position=max(max_position, _extended(rope)),
            rope=rope,
            vocab_size=config.integer("vocab_size"),
            rms_norm_eps=config.number("rms_norm_eps", 1e-6),
            tie_embeddings=config.flag("tie_word_embeddings"),
            qkv_bias=attention_bias if traits.qkv_bias is None else traits.qkv_bias,
            o_bias=attention_bias if traits.o_bias is None else traits.o_bias,
            mlp_bias=config.flag("mlp_bias") if traits.mlp_bias is None else traits.mlp_bias,
            qk_norm=traits.qk_norm,
            windows=_windows(config, traits),
            dtype=_dtype(config),
            bos_id=next(iter(config.integers("bos_token_id")), None),
            eos_ids=config.integers("eos_token_id"),
            **_sizes(config, traits),
            **(_experts(config) if traits.moe else {}),
        )
        if built.rotary_dim % 2 or built.rotary_dim < 2:
            raise config.error("head_dim", f"one of which an even number rotates, not {built.rotary_dim}")
        return built


def _refuse(config: Fields) -> None:
    if config.get("hidden_act") not in (None, "silu"):
        raise config.error("hidden_act", "silu")


def _sizes(config: Fields, traits: Architecture) -> dict[str, Any]:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.error("num_key_value_heads", f"a divisor of num_attention_heads, which is {heads}")
    if config.get("head_dim") is None and traits.head_dim is None and hidden % heads:
        raise config.error("hidden_size", f"a multiple of num_attention_heads, which is {heads}")
    return {
        "hidden_size": hidden,
        "intermediate_size": config.integer("intermediate_size"),
        "num_layers": config.integer("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": config.integer("head_dim", traits.head_dim or hidden // heads),
    }


def _extended(rope: RopeConfig) -> int:
    # The usual recipe adds yarn to a config.json and leaves max_position_embeddings as it was.
    return int(rope.factor * rope.original_max_position) if rope.type == "yarn" else 0


def _windows(config: Fields, traits: Architecture) -> tuple[int, ...]:
    layers = config.integer("num_hidden_layers")
    # null means no window, absent means the default: the one field where the two differ.
    given = config.get("sliding_window") if "sliding_window" in config.values else DEFAULT_WINDOW
    switched_off = traits.windows != "all" and not config.flag("use_sliding_window")
    if traits.windows == "none" or given is None or switched_off:
        window = 0
    else:
        window = config.integer("sliding_window", DEFAULT_WINDOW)
    if traits.windows != "by_layer":
        return (window,) * layers
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.integer("max_window_layers", 28, minimum=0)
        return tuple(window if layer >= first else 0 for layer in range(layers))
    sliding = "sliding_attention"
    allowed = {sliding, "full_attention"} if window else {"full_attention"}
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= allowed:
        listed = " or ".join(sorted(allowed))
        raise config.error("layer_types", f"a list with {listed} for each of {layers} layers")
    return tuple(window if kind == sliding else 0 for kind in kinds)


def _experts(config: Fields) -> dict[str, Any]:
    name = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    experts = config.integer(name, minimum=0)
    per_token = config.integer("num_experts_per_tok", 8)
    if experts and per_token > experts:
        raise config.error("num_experts_per_tok", f"at most {name}, which is {experts}")
    return {
        "num_experts": experts,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": config.integer("moe_intermediate_size"),
        "norm_topk_prob": config.flag("norm_topk_prob"),
        "decoder_sparse_step": config.integer("decoder_sparse_step", 1),
        "mlp_only_layers": config.integers("mlp_only_layers"),
    }


def _dtype(config: Fields) -> str | None:
    name = "dtype" if config.get("dtype") is not None else "torch_dtype"
    stated = config.get(name)
    if stated is None:
        return None
    if stated not in DTYPES:
        raise config.error(name, "one of " + ", ".join(DTYPES))
    return str(stated)
