"""Are an engine's tokens those of the model? Looked at before anything is timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.peers.protocol import Tokens

TEXTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time, there was a small",
    "The first president of the United States was",
    "To make a cup of tea, first",
    "The largest planet in our solar system is",
    "In Python, a list is",
    "The opposite of hot is",
)
OUTPUT_LEN = 16


@dataclass(frozen=True)
class Agreement:
    """Of `tokens` greedy tokens, how many come before the first that differs, summed over all prompts;
    and of `prompts`, how many begin with the same token.
    """

    equal: int
    tokens: int
    begun: int
    prompts: int

    def __str__(self) -> str:
        return f"{self.equal}/{self.tokens}"

    @property
    def plausible(self) -> bool:
        """Whether it can be the same model: low precision changes some tokens, not most of the first."""
        return 2 * self.begun > self.prompts


def agreement(reference: Tokens, found: Tokens) -> Agreement:
    """Compare tokens, prompt by prompt."""
    lengths = [_common(wanted, got) for wanted, got in zip(reference, found, strict=True)]
    return Agreement(sum(lengths), sum(map(len, reference)), sum(n > 0 for n in lengths), len(lengths))


def _common(wanted: Sequence[int], got: Sequence[int]) -> int:
    pairs = zip(wanted, got, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(wanted), len(got)))
