"""What can be set for each evaluation; the flags are made from these, as those of the engine are."""

from __future__ import annotations

from dataclasses import dataclass

from piecework.config import check, setting


@dataclass(frozen=True)
class Gsm8kOptions:
    """`eval gsm8k`: questions whose answer is a number. Names and defaults are SGLang's."""

    data: str = setting("", "JSON lines with `question` and `answer`: the questions (required)")
    train: str | None = setting(
        None, "JSON lines to take the examples from (default: the first lines of --data, which are not asked)"
    )
    num_questions: int | None = setting(None, "questions to ask (default: 200, or all that the file has)")
    num_shots: int = setting(5, "solved examples before each question", low=0)
    parallel: int = setting(32, "most questions in flight")
    max_tokens: int = setting(512, "most tokens of an answer", flags=("--max-new-tokens",))
    base_url: str | None = setting(
        None, "ask an OpenAI-compatible server, such as http://127.0.0.1:8000", flags=("--url",)
    )
    api_key: str | None = setting(None, "with --base-url: sent as a bearer token (env: OPENAI_API_KEY)")
    request_timeout: float = setting(600.0, "with --base-url: seconds until a request counts as failed")

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class PerplexityOptions:
    """`eval perplexity`: how well a text is predicted, token by token."""

    data: str = setting("", "a text file, or JSON lines whose texts are joined (required)")
    max_tokens: int = setting(50_000, "most tokens of the text that are read")
    context: int | None = setting(
        None, "tokens of a window (default: 2048, or what the model's context and the KV cache hold)", low=2
    )
    stride: int | None = setting(None, "tokens from one window to the next (default: the window's length)")

    def __post_init__(self) -> None:
        check(self)
