"""The text of a sequence while it is generated."""

from __future__ import annotations

from collections.abc import Sequence

from piecework.tokenizer.stop import StopMatcher
from piecework.tokenizer.stream import text_stream
from piecework.tokenizer.tokenizer import Tokenizer


class Detokenizer:
    """Gives the text of output tokens as they come, and stops at stop strings.

    All texts that `push` and at last `flush` return, joined, are what `Tokenizer.decode` gives for prompt
    and output less what it gives for the prompt, or the part of it before the stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._stream = text_stream(tokenizer.vocabulary, skip_special_tokens)
        self._stream.skip(prompt_ids)
        self._matcher = StopMatcher(stop, include_stop)

    def push(self, token_id: int, check_stop: bool = True) -> tuple[str, str | None]:
        """Take the next output token; return the new text, and the stop string if one is complete.

        Text ends with whole characters, and text that may turn out to begin a stop string comes later.
        With `check_stop` False a stop string that ends in this token's text doesn't count. After a stop
        string nothing comes any more.
        """
        return self._matcher.push(self._stream.push(token_id), check_stop)

    def flush(self) -> str:
        """End the text: return what was held back. Half a character comes as U+FFFD."""
        text, _ = self._matcher.push(self._stream.finish(), check=False)
        return text + self._matcher.flush()
