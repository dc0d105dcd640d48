"""The special tokens that the metadata of a GGUF file names."""

from __future__ import annotations

from typing import Any

CONTROL, USER_DEFINED, BYTE = 3, 4, 6  # of the values in tokenizer.ggml.token_type

# The tokens that end a turn of a chat, in llama.cpp's order of search (src/llama-vocab.cpp).
_END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")


def token_id(metadata: dict[str, Any], name: str) -> int | None:
    """The id of the special token `name` (bos, eos, eot, eom, padding, unknown), or None.

    An id beyond the vocabulary means none; converters write 2**32 - 1 for that.
    """
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    limit = len(metadata.get("tokenizer.ggml.tokens") or ()) or 2**31
    return value if isinstance(value, int) and 0 <= value < limit else None


def find_end_of_turn(metadata: dict[str, Any]) -> int | None:
    """The token that ends a turn: the one that the file names, else the known one in its vocabulary."""
    named = token_id(metadata, "eot")
    if named is not None:
        return named
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    kinds = metadata.get("tokenizer.ggml.token_type") or []
    control = {t: i for i, (t, kind) in enumerate(zip(tokens, kinds, strict=False)) if kind == CONTROL}
    return next((control[t] for t in _END_OF_TURN if t in control), None)


def end_ids(metadata: dict[str, Any]) -> list[int]:
    """Every token that ends a generation, without doubles; the eos token first."""
    ids = (token_id(metadata, "eos"), find_end_of_turn(metadata), token_id(metadata, "eom"))
    return list(dict.fromkeys(i for i in ids if i is not None))
