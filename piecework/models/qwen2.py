"""Qwen2 and Qwen2.5 (arXiv:2407.10671): Llama with biases on q, k and v, and windows on some layers."""

from __future__ import annotations

from piecework.models.decoder import CausalLM


class Qwen2ForCausalLM(CausalLM):
    """See the module; `piecework.models.architectures` says how its config is read."""
