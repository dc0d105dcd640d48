"""Text to token ids and back, over a `tokenizers` tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as Backend

from piecework.errors import RequestError
from piecework.tokenizer.chat import ChatTemplate
from piecework.tokenizer.stream import ByteStream
from piecework.tokenizer.vocabulary import Vocabulary


class Tokenizer:
    """Encodes prompts and chats, decodes tokens. Safe to use from several threads.

    Attributes: `vocabulary`, `bos_id` (None where there is none), `eos_ids` (the tokenizer's own end
    tokens; a model's generation_config may have more), `vocab_size` (tokens of the tokenizer; the model's
    head may have more rows, and the ids beyond decode to nothing).
    """

    def __init__(
        self,
        backend: Backend,
        *,
        bos_id: int | None = None,
        eos_ids: Sequence[int] = (),
        chat_template: str | Mapping[str, str] | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> None:
        """Take over `backend`; special tokens around a prompt are its post-processor's business.

        `chat_template` is a Jinja template, or several by name (`default`, `tool_use`).
        `template_variables` are texts such as `bos_token` that templates may use.
        """
        backend.no_truncation()
        backend.no_padding()
        self.vocabulary = Vocabulary(backend)
        self.bos_id = bos_id
        self.eos_ids = tuple(eos_ids)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self._backend = backend
        self._template = ChatTemplate(chat_template, template_variables or {}) if chat_template else None

    @property
    def has_chat_template(self) -> bool:
        """True where `chat_prompt` and `encode_chat` can be used."""
        return self._template is not None

    def check_chat_template(self) -> None:
        """Compile the chat template, if there is one. Raises ModelError where it is no valid Jinja."""
        if self._template is not None:
            self._template.compile()

    def encode(self, text: str, add_special_tokens: bool = True, *, param: str = "prompt") -> list[int]:
        """Return the token ids of a text, with the model's special tokens (as bos) around it if wanted.

        Special tokens that are written out in the text become what they name.

        Raises:
            RequestError: `text` is not a valid Unicode string; names the field `param`.
        """
        if not isinstance(text, str):  # a batch would take a pair of texts
            raise _unusable(text, param)
        # Encoding one text holds the interpreter lock, a batch of one does not: a long prompt must not
        # stop the other threads. The tokens are the same.
        try:
            batch = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise _unusable(text, param) from error
        ids: list[int] = batch[0].ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Bytes that are not UTF-8 come as U+FFFD, unknown ids as nothing."""
        if self.vocabulary.rule is not None:
            return ByteStream(self.vocabulary, skip_special_tokens).decode(ids)
        known = [token_id for token_id in ids if self.vocabulary.name(token_id) is not None]
        text: str = self._backend.decode(known, skip_special_tokens=skip_special_tokens)
        return text

    def token(self, token_id: int) -> str:
        r"""Return the text of one token, as within a text; `bytes:\xe2\x80` where it isn't UTF-8.

        The form for bytes is that of OpenAI's API.
        """
        data = self.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token stands for; none for an id without a token."""
        return self.vocabulary.bytes_of(token_id)

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_args: Any,
    ) -> str:
        """Return a chat as the text that the model was trained on.

        Raises:
            RequestError: there is no chat template, a message isn't one (text only), or the template
                refuses the chat; names `messages` or the part of it.
        """
        if self._template is None:
            raise RequestError(
                "messages cannot be used: this model has no chat template; give one with "
                "--chat-template FILE, or send a prompt",
                param="messages",
                code="no_chat_template",
            )
        return self._template.render(messages, tools, add_generation_prompt, template_args)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_args: Any,
    ) -> list[int]:
        """Return the token ids of `chat_prompt`. Templates write bos themselves, so none is added."""
        text = self.chat_prompt(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **template_args
        )
        return self.encode(text, add_special_tokens=False, param="messages")


def _unusable(text: Any, param: str) -> RequestError:
    if not isinstance(text, str):
        return RequestError(f"{param}={text!r} is not allowed: a string", param=param)
    place = next(i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff")
    return RequestError(
        f"{param} is not valid Unicode: character {place} is the lone surrogate U+{ord(text[place]):04X}",
        param=param,
    )
