"""Token by token to text, in constant time a token, and never half a character.

`tokenizers.decoders.DecodeStream` does the same, but with random ids of a byte-fallback vocabulary it
raises "Invalid prefix encountered" or gives other text than `decode` in half of the cases.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from typing import Protocol

from piecework.tokenizer.vocabulary import Vocabulary

_REPLACEMENT = "\ufffd"
_ESCAPED = re.compile("[\udc80-\udcff]")
_LONGEST_CHARACTER = 4  # bytes
# The window method looks at so many tokens before the new ones, and waits at most for so many new ones.
_CONTEXT = 8
_LONGEST_WAIT = 16


class TextStream(Protocol):
    """Turns token ids into text. What `push` and at last `finish` return, joined, is the whole text."""

    def skip(self, prompt_ids: Sequence[int]) -> None:
        """Go past a prompt; to be called before the first `push`."""

    def push(self, token_id: int) -> str:
        """Take the next token and return the text that is complete now."""

    def finish(self) -> str:
        """Return what is left; bytes that don't make a character come as U+FFFD."""


def text_stream(vocabulary: Vocabulary, skip_special_tokens: bool) -> TextStream:
    """Return a stream that fits the vocabulary's decoder."""
    kind = WindowStream if vocabulary.rule is None else ByteStream
    return kind(vocabulary, skip_special_tokens)


class ByteStream:
    """Joins tokens' bytes, for vocabularies with a decoder rule.

    Bytes that are not UTF-8 become U+FFFD: one for each broken character in byte-level vocabularies, one
    for each byte in the sentencepiece family. There, whole characters beside broken ones are kept, as
    sentencepiece itself does (`tokenizers` gives up every byte of such a run).
    """

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool) -> None:
        assert vocabulary.rule is not None, "ByteStream needs a decoder rule"
        self._vocabulary = vocabulary
        self._hidden = vocabulary.special_ids if skip_special_tokens else frozenset()
        self._first = bool(vocabulary.rule.first_drops)
        self._strip = vocabulary.rule.strip
        self._per_byte = not vocabulary.rule.byte_level
        # With surrogateescape every byte that isn't part of a character gives one code point.
        errors = "surrogateescape" if self._per_byte else "replace"
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors)

    def skip(self, prompt_ids: Sequence[int]) -> None:
        """Go past a prompt, in time that doesn't grow with it.

        A character that begins in the prompt and isn't complete there belongs to the text that follows.
        """
        # So many bytes tell where a character begins, and whether the text has begun.
        wanted = max(_LONGEST_CHARACTER, self._strip)
        start = len(prompt_ids)
        while start > 0 and wanted > 0:
            start -= 1
            if prompt_ids[start] not in self._hidden:
                wanted -= len(self._vocabulary.bytes_of(prompt_ids[start]))
        for token_id in prompt_ids[start:]:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """Take the next token and return the text that is complete now."""
        return self._text((self._bytes(token_id),))

    def finish(self) -> str:
        """Return what is left; bytes that don't make a character come as U+FFFD."""
        return self._text((), final=True)

    def decode(self, ids: Iterable[int]) -> str:
        """Take all tokens and finish: the same text as token by token, faster."""
        return self._text(map(self._bytes, ids), final=True)

    def _bytes(self, token_id: int) -> bytes:
        if token_id in self._hidden:
            return b""
        if self._first and self._vocabulary.name(token_id) is not None:
            self._first = False
            return self._vocabulary.first_bytes_of(token_id)
        return self._vocabulary.bytes_of(token_id)

    def _text(self, parts: Iterable[bytes], final: bool = False) -> str:
        text = self._decoder.decode(b"".join(parts), final)
        if self._per_byte and not text.isascii():
            text = _ESCAPED.sub(_REPLACEMENT, text)
        if self._strip and text:
            kept = text.lstrip(" ")
            dropped = min(len(text) - len(kept), self._strip)
            self._strip = 0 if kept else self._strip - dropped
            text = text[dropped:]
        return text


class WindowStream:
    """Decodes the last few tokens with the tokenizer's own decoder, for decoders that are not known.

    New text is what a window's text has more with the new tokens than without them. Exact as long as
    the decoder looks no further back than one piece of text that was given out.
    """

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._skip_special = skip_special_tokens
        self._ids: list[int] = []
        self._old = 0  # so many of them have been given out, as the end of
        self._old_text = ""

    def skip(self, prompt_ids: Sequence[int]) -> None:
        """Go past a prompt, in time that doesn't grow with it."""
        self._ids = [token_id for token_id in prompt_ids[-_CONTEXT:] if self._is_shown(token_id)]
        self._give_out(0, self._decode())

    def push(self, token_id: int) -> str:
        """Take the next token and return the text that is complete now."""
        if not self._is_shown(token_id):
            return ""
        self._ids.append(token_id)
        text = self._decode()
        waiting = len(self._ids) - self._old
        if text == self._old_text or (text.endswith(_REPLACEMENT) and waiting < _LONGEST_WAIT):
            return ""
        new = text[len(self._old_text) :]
        self._give_out(self._old, text)
        return new

    def finish(self) -> str:
        """Return what is left; bytes that don't make a character come as U+FFFD."""
        return self._decode()[len(self._old_text) :]

    def _give_out(self, forget: int, text: str) -> None:
        self._ids = self._ids[forget:]
        self._old = len(self._ids)
        self._old_text = self._decode() if forget else text

    def _is_shown(self, token_id: int) -> bool:
        return self._vocabulary.is_shown(token_id, self._skip_special)

    def _decode(self) -> str:
        text: str = self._vocabulary.backend.decode(self._ids, skip_special_tokens=self._skip_special)
        return text
