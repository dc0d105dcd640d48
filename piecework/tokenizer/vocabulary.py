"""What each token id stands for."""

from __future__ import annotations

from tokenizers import Tokenizer as Backend

from piecework.tokenizer.decoder_rule import read_rule

_LARGEST_ID = 2**32 - 1  # what `tokenizers` can be asked for


class Vocabulary:
    """The tokens of a `tokenizers` tokenizer: their bytes, and which ones are special.

    An id without a token has no text: a model's head is often wider than its tokenizer. Attributes:
    `rule` (how token texts become bytes, None where the decoder is of no known family), `special_ids`.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.rule = read_rule(backend)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {}

    def name(self, token_id: int) -> str | None:
        """Return the token as the vocabulary writes it, or None where the id has none."""
        if not 0 <= token_id <= _LARGEST_ID:
            return None
        name: str | None = self.backend.id_to_token(token_id)
        return name

    def is_shown(self, token_id: int, skip_special_tokens: bool) -> bool:
        """True where the id is a token that a text shows."""
        if skip_special_tokens and token_id in self.special_ids:
            return False
        return self.name(token_id) is not None

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token, special ones too, as it stands within a text."""
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._find_bytes(token_id)
        return data

    def first_bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token at the start of a text."""
        name = self.name(token_id)
        if name is None or self.rule is None:
            return self.bytes_of(token_id)
        return self.rule.to_bytes(name, first=True)

    def _find_bytes(self, token_id: int) -> bytes:
        name = self.name(token_id)
        if name is None:
            return b""
        if self.rule is None:
            text: str = self.backend.decode([token_id], skip_special_tokens=False)
            return text.encode()
        return self.rule.to_bytes(name)
