"""From messages or `prompt` to token ids. Tokenising runs in a thread, so that streams do not stall."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from piecework.errors import RequestError
from piecework.server.messages import normalise
from piecework.server.protocol import ChatTemplateFields, TokenizeRequest
from piecework.server.reading import shorten

if TYPE_CHECKING:
    from piecework.engine.service import Service
    from piecework.tokenizer.tokenizer import Tokenizer

_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize"})


@dataclass(frozen=True)
class Prompt:
    """One prompt: its token ids, and its text where the client sent text."""

    ids: Sequence[int]
    text: str | None = None


class PromptReader:
    """Makes prompts for one model. All errors are RequestErrors that name the field."""

    def __init__(self, service: Service) -> None:
        self._tokenizer = service.tokenizer
        self._vocab_size = service.model_config.vocab_size
        self._max_model_len = service.max_model_len

    async def from_messages(self, fields: ChatTemplateFields | TokenizeRequest) -> list[int]:
        """Render messages with the chat template and tokenise them."""
        messages = normalise(fields.messages or [])
        arguments = self._template_arguments(fields)
        tokenizer = self._need_tokenizer("messages", "send token ids to /v1/completions")
        if not tokenizer.has_chat_template:
            message = "this model has no chat template: use /v1/completions, or serve it with --chat-template"
            raise RequestError(message, param="messages", code="no_chat_template")

        def work() -> list[int]:
            if not fields.continue_final_message:
                text = tokenizer.chat_prompt(messages, **arguments)
            else:
                text = _open_ended(tokenizer.chat_prompt(messages, **arguments), messages[-1])
            return tokenizer.encode(text, add_special_tokens=False, param="messages")

        return await asyncio.to_thread(work)

    async def from_prompt(self, value: Any, add_special_tokens: bool) -> list[Prompt]:
        """Take `prompt` apart: a string, a list of strings, token ids, or a list of lists of token ids."""
        if isinstance(value, str):
            return [await self.from_text(value, add_special_tokens)]
        if isinstance(value, list) and value:
            if all(isinstance(item, str) for item in value):
                return [await self.from_text(text, add_special_tokens) for text in value]
            if all(isinstance(item, list) for item in value):
                return await asyncio.to_thread(
                    lambda: [Prompt(self.check_ids(f"prompt[{i}]", ids)) for i, ids in enumerate(value)]
                )
            if not any(isinstance(item, str | list) for item in value):
                return [Prompt(await asyncio.to_thread(self.check_ids, "prompt", value))]
        allowed = "a string, a list of strings, a list of token ids, or a list of lists of token ids"
        raise RequestError(f"prompt={shorten(value)} is not allowed: {allowed}", param="prompt")

    async def from_text(self, text: str, add_special_tokens: bool) -> Prompt:
        """Tokenise one text."""
        tokenizer = self._need_tokenizer("prompt", "send token ids")
        ids = await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return Prompt(ids, text)

    def check_ids(self, param: str, ids: list[Any]) -> list[int]:
        """Check token ids against the vocabulary."""
        for place, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self._vocab_size:
                allowed = f"a token id from 0 to {self._vocab_size - 1}"
                raise RequestError(
                    f"{param}[{place}]={shorten(token)} is not allowed: {allowed}", param=param
                )
        return ids

    def check_length(self, param: str, ids: Sequence[int]) -> None:
        """Refuse an empty prompt, and one that leaves no room for a token in the context."""
        if not ids:
            raise RequestError(f"{param} is empty: a prompt has at least one token", param=param)
        if len(ids) >= self._max_model_len:
            raise RequestError(
                f"{param} has {len(ids)} tokens, but the context is {self._max_model_len} tokens long and "
                "needs room for at least one more",
                param=param,
                code="context_length_exceeded",
            )

    def _need_tokenizer(self, param: str, instead: str) -> Tokenizer:
        if self._tokenizer is None:
            message = f"{param} cannot be text: this model has no tokenizer; {instead}"
            raise RequestError(message, param=param, code="no_tokenizer")
        return self._tokenizer

    def _template_arguments(self, fields: ChatTemplateFields | TokenizeRequest) -> dict[str, Any]:
        extra = fields.chat_template_kwargs or {}
        for name in extra:
            if name in _RESERVED or not name.isidentifier():
                message = f"chat_template_kwargs may not hold {shorten(name)}: not a free name"
                raise RequestError(message, param="chat_template_kwargs")
        if fields.continue_final_message and fields.add_generation_prompt:
            raise RequestError(
                "continue_final_message=True is not allowed together with add_generation_prompt=True",
                param="continue_final_message",
            )
        opens = fields.add_generation_prompt is not False and not fields.continue_final_message
        return {**extra, "add_generation_prompt": opens}


def _open_ended(prompt: str, last: dict[str, Any]) -> str:
    """Cut a rendered prompt right after the last message, so that the model goes on with it."""
    content = last.get("content", "").lstrip()
    place = prompt.rfind(content.rstrip()) if content else -1
    if last["role"] != "assistant" or place < 0:
        raise RequestError(
            "continue_final_message=True is not allowed: the last message is not an assistant's with text "
            "that the chat template keeps",
            param="continue_final_message",
        )
    keeps_space = prompt.startswith(content, place)
    return prompt[: place + len(content if keeps_space else content.rstrip())]
