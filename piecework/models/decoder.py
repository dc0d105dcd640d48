"""The decoder-only transformer that all model files share: pre-norm layers on one residual stream."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from piecework.layers.attention import Attention, AttentionFn, AttentionSpec
from piecework.layers.embedding import Embedding
from piecework.layers.linear import Linear
from piecework.layers.mlp import MLP
from piecework.layers.moe import MoE
from piecework.layers.norm import RMSNorm
from piecework.layers.parallel import all_reduce, own_rows
from piecework.layers.rotary import RotaryTable
from piecework.models.config import ModelConfig


def attention_spec(config: ModelConfig, layer: int) -> AttentionSpec:
    """Describe the attention of `layer`; scores are scaled by 1 / sqrt(head_dim)."""
    return AttentionSpec(
        layer=layer,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
        window=config.window(layer),
    )


def _mlp(config: ModelConfig, layer: int, dtype: torch.dtype, device: torch.device) -> MLP | MoE:
    if not config.is_moe(layer):
        size = config.intermediate_size
        return MLP(config.hidden_size, size, bias=config.mlp_bias, dtype=dtype, device=device)
    return MoE(
        config.hidden_size,
        config.moe_intermediate_size,
        config.num_experts,
        config.num_experts_per_tok,
        renormalize=config.norm_topk_prob,
        dtype=dtype,
        device=device,
    )


class DecoderLayer(nn.Module):
    """h + attention(norm(h)), then h + mlp(norm(h)); of a shard both are sums over all ranks."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(
            hidden,
            attention_spec(config, layer),
            qkv_bias=config.qkv_bias,
            o_bias=config.o_bias,
            norm_eps=eps if config.qk_norm else None,
            dtype=dtype,
            device=device,
        )
        self.mlp = _mlp(config, layer, dtype, device)
        self.is_shard = config.shard.size > 1
        self.input_layernorm = RMSNorm(hidden, eps, dtype=dtype, device=device)
        self.post_attention_layernorm = RMSNorm(hidden, eps, dtype=dtype, device=device)

    def forward(self, h: Tensor, positions: Tensor, cos_sin: Tensor, num_valid_rows: Tensor | None) -> Tensor:
        """h [T, H] -> [T, H]."""
        h = h + self._whole(self.self_attn(self.input_layernorm(h), positions, cos_sin))
        y: Tensor = h + self._whole(self.mlp(self.post_attention_layernorm(h), num_valid_rows))
        return y

    def _whole(self, x: Tensor) -> Tensor:
        return all_reduce(x) if self.is_shard else x


class Decoder(nn.Module):
    """Embedding, layers and final norm; its names are those of the checkpoint below `model.`."""

    def __init__(
        self, config: ModelConfig, max_positions: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.vocabulary = config.shard.rows(config.vocab_size)
        self.is_shard = config.shard.size > 1
        rows = len(self.vocabulary)
        self.embed_tokens = Embedding(rows, config.hidden_size, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, dtype=dtype, device=device) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.rotary = RotaryTable(config.rope, config.rotary_dim, max_positions, device=device)

    def forward(self, input_ids: Tensor, positions: Tensor, num_valid_rows: Tensor | None) -> Tensor:
        """input_ids, positions [T] int64 -> hidden states after the final norm, [T, H]."""
        h = self._embed(input_ids)
        for layer in self.layers:
            h = layer(h, positions, self.rotary.cos_sin, num_valid_rows)
        y: Tensor = self.norm(h)
        return y

    def _embed(self, ids: Tensor) -> Tensor:
        if self.is_shard:
            own = self.vocabulary
            return all_reduce(own_rows(self.embed_tokens, ids, own.start, len(own)))
        h: Tensor = self.embed_tokens(ids)
        return h


class CausalLM(nn.Module):
    """A language model without any state: attention's cache belongs to whoever binds attention.

    Parameters are allocated and not initialised. Their names are those of the Hugging Face checkpoint,
    but for the packed ones: `packed_modules` maps a packed module's name to the checkpoint's names,
    in the order of their rows. A tied head has no parameter of its own.
    """

    packed_modules: ClassVar[dict[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }

    def __init__(
        self,
        config: ModelConfig,
        max_positions: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        device = torch.device(device)
        self.config = config
        # The precision of hidden states and the KV cache; quantised weights have types of their own.
        self.dtype = dtype
        self.max_positions = max_positions
        self.model = Decoder(config, max_positions, dtype=dtype, device=device)
        self.lm_head: Linear | None = None
        if not config.tie_embeddings:
            size = config.hidden_size
            self.lm_head = Linear(size, len(self.model.vocabulary), bias=False, dtype=dtype, device=device)

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """What each layer's attention needs, by layer."""
        return tuple(attention_spec(self.config, layer) for layer in range(self.config.num_layers))

    def bind_attention(self, fn: AttentionFn | None) -> None:
        """Let `fn` do attention in every layer of this model; None: the named op, one causal sequence.

        Under torch.export and torch.compile the op is emitted whatever is bound.
        """
        for module in self.modules():
            if isinstance(module, Attention):
                module.fn = fn

    def forward(self, input_ids: Tensor, positions: Tensor, num_valid_rows: Tensor | None = None) -> Tensor:
        """Run the model up to its final norm.

        Args:
            input_ids: [T] int64, below vocab_size; the caller checks.
            positions: [T] int64, below max_positions; the caller checks.
            num_valid_rows: [1] integer; rows from there on are padding and reach no expert.

        Returns:
            Hidden states [T, H]; `head` makes logits of those rows that need them.
        """
        y: Tensor = self.model(input_ids, positions, num_valid_rows)
        return y

    def head(self, rows: Tensor) -> Tensor:
        """Hidden states [R, H] -> logits [R, V] in the model's dtype; of a shard those of its own rows."""
        if self.lm_head is None:
            return self.model.embed_tokens.project(rows)
        logits: Tensor = self.lm_head(rows)
        return logits
