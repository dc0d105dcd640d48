"""A tiny sentencepiece vocabulary as a GGUF file holds it, and its encoding, written out slowly."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

SPECIAL = ("<unk>", "<s>", "</s>")
_MERGED = (
    "▁a",
    "ab",
    "▁ab",
    "bc",
    "abc",
    "▁▁",
    "▁▁▁▁",
    "▁abc",
    "ca",
    "▁1",
    "él",
    "▁t",
    "he",
    "▁the",
    "in",
    "▁▁▁",
)
_SINGLE = tuple("▁abcé1thelinors,.")
_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
_TOKENS = (*SPECIAL, *_BYTES, *_MERGED, *_SINGLE)
# As sentencepiece has it: a merge's score falls with its place in training.
_SCORES = (
    [0.0] * (3 + 256) + [float(-i) for i in range(len(_MERGED))] + [-1000.0 - i for i in range(len(_SINGLE))]
)
_ID = {token: index for index, token in enumerate(_TOKENS)}


def spm_metadata() -> dict[str, Any]:
    """The tokenizer's section of a file's metadata."""
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(_TOKENS),
        "tokenizer.ggml.scores": list(_SCORES),
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(_MERGED) + len(_SINGLE)),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def encode(text: str) -> list[int]:
    """Join the neighbours whose result has the best score, the leftmost first, until none is a token.

    This is sentencepiece's BPE (bpe_model.cc): what is no token in the end becomes its UTF-8 bytes.
    """
    if not text:
        return []
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [(_SCORES[_ID[a + b]], -i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in _ID]
        if not pairs:
            break
        place = -max(pairs)[1]
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
    ids: list[int] = []
    for piece in pieces:
        ids += [_ID[piece]] if piece in _ID else [_ID[f"<0x{byte:02X}>"] for byte in piece.encode()]
    return ids
