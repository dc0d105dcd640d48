"""Qwen3 (arXiv:2505.09388): no biases by default, queries and keys normalised per head."""

from __future__ import annotations

from piecework.models.decoder import CausalLM


class Qwen3ForCausalLM(CausalLM):
    """See the module; `piecework.models.architectures` says how its config is read."""
