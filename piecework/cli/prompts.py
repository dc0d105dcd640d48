"""Where the prompts of `generate` come from: arguments, a file, or standard input."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from piecework.cli.parser import UserError
from piecework.errors import ModelError
from piecework.json_text import parse_json

if TYPE_CHECKING:
    from piecework.tokenizer.tokenizer import Tokenizer

Messages = list[dict[str, Any]]
_KEYS = ("prompt", "messages", "prompt_token_ids")


@dataclass(frozen=True)
class Prompt:
    """One prompt as it was given: exactly one of text, chat messages and token ids."""

    text: str | None = None
    messages: Messages | None = None
    token_ids: tuple[int, ...] | None = None

    @property
    def given(self) -> str | Messages | list[int]:
        """The prompt in the form that it was given, for the output."""
        if self.messages is not None:
            return self.messages
        return self.text if self.text is not None else list(self.token_ids or ())

    def encode(self, tokenizer: Tokenizer | None, *, chat: bool, system: str | None) -> Sequence[int]:
        """Return the token ids; `chat` puts a text through the chat template, `system` in front of it."""
        if self.token_ids is not None:
            return self.token_ids
        if tokenizer is None:
            raise ModelError("this model has no tokenizer; give prompts as prompt_token_ids in a JSONL file")
        if self.messages is None and not chat:
            return tokenizer.encode(self.text or "")
        first = [{"role": "system", "content": system}] if system is not None else []
        return tokenizer.encode_chat([*first, *(self.messages or [{"role": "user", "content": self.text}])])


def read_prompts(arguments: Sequence[str], file: str | None) -> list[Prompt]:
    """Return the prompts of the command line, then those of `file` (`-`: standard input).

    Without either, standard input is read, unless it is a terminal. Raises UserError for no prompt at all.
    """
    prompts = [Prompt(text=text) for text in arguments]
    if file is None and not prompts:
        if sys.stdin is None or sys.stdin.isatty():
            raise UserError("no prompt; give --prompt TEXT, --prompt-file FILE, or standard input")
        file = "-"
    if file is not None:
        prompts += parse_prompts(_read(file).split("\n"), file)
    if not prompts:
        raise UserError(f"no prompt in {'standard input' if file == '-' else file}")
    return prompts


def parse_prompts(lines: Iterable[str], name: str) -> list[Prompt]:
    """Read one prompt a line: plain text, or JSONL where `name` ends in .jsonl or the first line is such.

    A JSONL line is an object with one of `prompt`, `messages`, `prompt_token_ids`. Empty lines are skipped.
    """
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        return []
    if name.endswith(".jsonl") or _looks_like_json(numbered[0][1]):
        return [_from_json(line, f"{name}, line {number}") for number, line in numbered]
    return [Prompt(text=line) for _, line in numbered]


def _looks_like_json(line: str) -> bool:
    try:
        loaded = parse_json(line)
    except ValueError:
        return False
    return isinstance(loaded, dict) and any(key in loaded for key in _KEYS)


def _from_json(line: str, place: str) -> Prompt:
    try:
        loaded = parse_json(line)
    except ValueError as error:
        raise UserError(f"{place}: not JSON ({error})") from error
    if not isinstance(loaded, dict) or len(loaded) != 1 or next(iter(loaded)) not in _KEYS:
        raise UserError(
            f"{place}: a line holds an object with one key of {', '.join(_KEYS)}; got {line[:80]}"
        )
    ((key, value),) = loaded.items()
    if key == "prompt" and isinstance(value, str):
        return Prompt(text=value)
    if key == "messages" and _is_list(value, dict):
        return Prompt(messages=value)
    if key == "prompt_token_ids" and _is_list(value, int):
        return Prompt(token_ids=tuple(value))
    raise UserError(f"{place}: prompt is a text, messages a list of objects, prompt_token_ids a list of ids")


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(type(part) is kind for part in value)


def _read(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"prompt file {file!r} cannot be read: {error}") from error
