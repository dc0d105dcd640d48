"""Log probabilities in the two forms of the OpenAI API, and in vLLM's form for prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from piecework.sampling import TokenLogprob

if TYPE_CHECKING:
    from piecework.tokenizer.tokenizer import Tokenizer

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say; the OpenAI API uses the same number."""


class LogprobWriter:
    """Writes log probabilities; without a tokenizer a token's text is `token_id:<id>`."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def text(self, token: int) -> str:
        """A token's text."""
        return f"token_id:{token}" if self._tokenizer is None else self._tokenizer.token(token)

    def chat(self, tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
        """`logprobs` of a chat choice: one entry a token, its alternatives best first."""
        content = [
            self._entry(t.token_id, t.logprob)
            | {"top_logprobs": [self._entry(token, value) for token, value in t.top]}
            for t in tokens
        ]
        return {"content": content, "refusal": None}

    def completion(
        self, tokens: Sequence[TokenLogprob | None], ids: Sequence[int], offset: int = 0
    ) -> dict[str, Any]:
        """`logprobs` of a completion choice, as parallel lists.

        `offset` is the place of the first token in the returned text. A token without a log
        probability (the first one of an echoed prompt) gets null. The chosen token is among the
        alternatives in any case.
        """
        texts = [self.text(token) for token in ids]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [None if t is None else _finite(t.logprob) for t in tokens],
            "top_logprobs": [None if t is None else self._alternatives(t) for t in tokens],
            "text_offset": offsets,
        }

    def prompt(self, tokens: Sequence[TokenLogprob | None]) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: per token a map from token id to logprob, rank and text.

        The rank of a token that is not among the best is not known and null.
        """
        return [None if t is None else self._ranked(t) for t in tokens]

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        raw = b"" if self._tokenizer is None else self._tokenizer.token_bytes(token)
        return {"token": self.text(token), "logprob": _finite(logprob), "bytes": list(raw)}

    def _alternatives(self, t: TokenLogprob) -> dict[str, float]:
        found: dict[str, float] = {}
        for token, logprob in (*t.top, (t.token_id, t.logprob)):
            found.setdefault(self.text(token), _finite(logprob))  # two ids may share a text: the best counts
        return found

    def _ranked(self, t: TokenLogprob) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for rank, (token, logprob) in enumerate(t.top, start=1):
            found[str(token)] = self._rank_entry(token, logprob, rank)
        found.setdefault(str(t.token_id), self._rank_entry(t.token_id, t.logprob, None))
        return found

    def _rank_entry(self, token: int, logprob: float, rank: int | None) -> dict[str, Any]:
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": self.text(token)}


def _finite(logprob: float) -> float:
    return max(float(logprob), LOWEST)
