"""Mistral: Llama with a sliding window on every layer (arXiv:2310.06825), or with none."""

from __future__ import annotations

from piecework.models.decoder import CausalLM


class MistralForCausalLM(CausalLM):
    """See the module; `piecework.models.architectures` says how its config is read."""
