"""Qwen3-MoE (arXiv:2505.09388): Qwen3 with routed experts in all or some layers."""

from __future__ import annotations

from piecework.models.decoder import CausalLM


class Qwen3MoeForCausalLM(CausalLM):
    """See the module; `piecework.models.architectures` says how its config is read."""
