"""How many tokens a static cache has room for: the arithmetic that admission and the device share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from piecework.errors import ConfigError

DEFAULT_CAPACITIES = (1024, 2048, 4096)


@dataclass(frozen=True)
class Capacities:
    """The room, in tokens, of each decode program, smallest first; `chunk` rows has the prefill program.

    A program of capacity c runs steps after which c tokens are kept, or fewer.
    """

    sizes: tuple[int, ...]
    chunk: int

    @classmethod
    def choose(cls, given: Sequence[int], limit: int, chunk: int, asked: int | None = None) -> Capacities:
        """Settle the sizes for contexts of at most `limit` tokens, the model's positions.

        Without any `given` they are the default ones below `limit`. Raises ConfigError where one is larger
        than `limit`, or where the largest is too small for `asked` tokens of prompt plus output.
        """
        sizes = tuple(sorted(given or {min(size, limit) for size in DEFAULT_CAPACITIES}))
        text = ",".join(map(str, sizes))
        if sizes[-1] > limit:
            raise ConfigError("kv_capacities", text, f"at most {limit} tokens, the longest context")
        made = cls(sizes, min(chunk, sizes[-1]))
        if asked is not None and asked > made.longest:
            allowed = f"a largest one of at least {kept(asked, 0)} tokens for max_model_len={asked}"
            raise ConfigError("kv_capacities", text, allowed)
        return made

    @property
    def largest(self) -> int:
        """Tokens that the buffers have room for."""
        return self.sizes[-1]

    @property
    def longest(self) -> int:
        """The longest prompt plus output."""
        return self.largest + 1

    def variant(self, tokens: int) -> int:
        """Return the smallest capacity that has room for `tokens`, which must be there."""
        return next(size for size in self.sizes if size >= tokens)


def kept(prompt: int, output: int) -> int:
    """Return how many tokens are kept of a prompt and an output: nothing follows the last one drawn."""
    return prompt + output - 1
