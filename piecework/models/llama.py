"""Llama 1 to 3 and what shares their layout, SmolLM2 among it: grouped heads, no biases by default."""

from __future__ import annotations

from piecework.models.decoder import CausalLM


class LlamaForCausalLM(CausalLM):
    """See the module; `piecework.models.architectures` says how its config is read."""
