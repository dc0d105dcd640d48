"""The bytes of each token, and the rule that joins them, for the decoders that language models use.

Two families are known exactly. Byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM2) writes every byte as one
printable character, as in https://github.com/openai/gpt-2/blob/master/src/encoder.py. The sentencepiece
family (Llama 2, Mistral, Gemma, T5) writes a space as U+2581, single bytes as `<0x41>`, and drops the space
that its encoder put before the text. `tokenizers` describes both as a decoder object, which is read here.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Backend

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class DecoderRule:
    """How token texts become bytes.

    `byte_level`: characters stand for bytes. `replacements`: (old, new) texts, in order. `byte_tokens`:
    `<0x41>` is a byte. `strip`: so many spaces at the start of the whole text are dropped. `first_drops`:
    a text that the first token loses wherever it has it.
    """

    byte_level: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    byte_tokens: bool = False
    strip: int = 0
    first_drops: str = ""

    def to_bytes(self, token: str, *, first: bool = False) -> bytes:
        """Return what a token stands for; `first`: it is the first one of a text."""
        if self.byte_level:
            try:
                return bytes(_BYTE_OF[char] for char in token)
            except KeyError:  # an added token, which is written as it is
                return token.encode()
        if self.byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        if first and self.first_drops:
            token = token.replace(self.first_drops, "")
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token.encode()


def read_rule(backend: Backend) -> DecoderRule | None:
    """Return the rule of a tokenizer's decoder, or None where it isn't of a known family."""
    if backend.decoder is None:
        return None
    steps = _flatten(json.loads(backend.decoder.__getstate__()))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return DecoderRule(byte_level=True)
    if kinds == ["Metaspace"]:
        mark = steps[0]["replacement"]
        drops = "" if steps[0].get("prepend_scheme", "always") == "never" else mark
        return DecoderRule(replacements=((mark, " "),), first_drops=drops)
    replacements = []
    while steps and steps[0]["type"] == "Replace" and "String" in steps[0]["pattern"]:
        step = steps.pop(0)
        replacements.append((step["pattern"]["String"], step["content"]))
    match [step["type"] for step in steps]:
        case ["ByteFallback", "Fuse"]:
            return DecoderRule(replacements=tuple(replacements), byte_tokens=True)
        case ["ByteFallback", "Fuse", "Strip"] if steps[-1]["content"] == " " and steps[-1]["stop"] == 0:
            return DecoderRule(replacements=tuple(replacements), byte_tokens=True, strip=steps[-1]["start"])
    return None


def _flatten(step: dict[str, Any]) -> list[dict[str, Any]]:
    if step["type"] != "Sequence":
        return [step]
    return [inner for outer in step["decoders"] for inner in _flatten(outer)]


def _bytes_of_characters() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 characters are themselves, the other bytes follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + number): byte for number, byte in enumerate(others)}


_BYTE_OF = _bytes_of_characters()
