"""GGUF files: header, configuration, tensors and tokenizer."""

from __future__ import annotations

from piecework.weights.gguf.tokenizer import TokenizerMeta, tokenizer_data

__all__ = ["TokenizerMeta", "tokenizer_data"]
