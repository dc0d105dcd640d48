"""From request fields to `SamplingParams`: the model's defaults, then what the client gave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piecework.errors import RequestError
from piecework.sampling import SamplingParams
from piecework.server.protocol import ChatRequest, CompletionRequest, SamplingFields
from piecework.server.reading import shorten

COMPLETION_MAX_TOKENS = 16
"""What /v1/completions generates when max_tokens is not given; the OpenAI API says so."""

_WITHOUT_ECHO = "an integer of at least 1, or 0 with echo=true"
_COPIED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "n",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "prompt_logprobs",
    "skip_special_tokens",
)


class ParamsReader:
    """Makes the sampling parameters of a request. All errors are RequestErrors that name the field."""

    def __init__(self, defaults: SamplingParams, vocab_size: int, max_model_len: int) -> None:
        self._defaults = defaults
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len

    def chat(self, request: ChatRequest, prompt_tokens: int) -> SamplingParams:
        """The parameters of a chat completion; without a limit it may fill the context."""
        changes = self._shared(request)
        if request.top_logprobs is not None and not request.logprobs:
            message = f"top_logprobs={request.top_logprobs} is not allowed: only together with logprobs=true"
            raise RequestError(message, param="top_logprobs")
        if request.logprobs:
            changes["logprobs"] = request.top_logprobs or 0
        asked, name = request.max_completion_tokens, "max_completion_tokens"
        if asked is None:
            asked, name = request.max_tokens, "max_tokens"
        elif request.max_tokens not in (None, asked):
            message = (
                f"max_tokens={request.max_tokens} is not allowed: max_completion_tokens={asked} is given"
            )
            raise RequestError(message, param="max_tokens")
        names = {"max_tokens": name, "logprobs": "top_logprobs"}
        return self._build(changes, asked, self._defaults.max_tokens, prompt_tokens, names)

    def completion(self, request: CompletionRequest, prompt_tokens: int) -> SamplingParams:
        """The parameters of a text completion.

        `max_tokens=0` with `echo` only scores the prompt: the engine makes one token, which is not sent.
        """
        changes = self._shared(request)
        if request.logprobs is not None:
            changes["logprobs"] = request.logprobs
            if request.echo:
                changes["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
        if request.max_tokens is not None and request.max_tokens < (0 if request.echo else 1):
            allowed = "an integer of at least 0, as echo=true" if request.echo else _WITHOUT_ECHO
            message = f"max_tokens={request.max_tokens} is not allowed: {allowed}"
            raise RequestError(message, param="max_tokens")
        asked = 1 if scores_only(request) else request.max_tokens
        default = self._defaults.max_tokens or COMPLETION_MAX_TOKENS
        return self._build(changes, asked, default, prompt_tokens, {})

    def _shared(self, request: SamplingFields) -> dict[str, Any]:
        if request.stream_options is not None and not request.stream:
            raise RequestError("stream_options is only allowed with stream=true", param="stream_options")
        if request.stream and request.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs is not allowed with stream=true", param="prompt_logprobs")
        changes = {name: value for name in _COPIED if (value := getattr(request, name)) is not None}
        if request.logit_bias is not None:
            changes["logit_bias"] = {self._token(t): bias for t, bias in request.logit_bias.items()}
        for token in request.stop_token_ids or ():
            if not 0 <= token < self._vocab_size:
                raise self._no_token("stop_token_ids", token)
        return changes

    def _token(self, text: str) -> int:
        """A key of logit_bias as a token id."""
        if len(text) < 12 and text.isascii() and text.isdigit() and int(text) < self._vocab_size:
            return int(text)
        raise self._no_token("logit_bias", text)

    def _no_token(self, param: str, value: Any) -> RequestError:
        allowed = f"token ids from 0 to {self._vocab_size - 1}"
        return RequestError(f"{param} holds {shorten(value)}, which is not allowed: {allowed}", param=param)

    def _build(
        self,
        changes: dict[str, Any],
        asked: int | None,
        default: int | None,
        prompt_tokens: int,
        names: Mapping[str, str],
    ) -> SamplingParams:
        """Set max_tokens within the context and build; `names` are what the client calls our fields."""
        room = self._max_model_len - prompt_tokens
        chosen = asked if asked is not None else min(default or room, room)
        try:
            params = self._defaults.with_changes(**changes, max_tokens=chosen)
        except RequestError as error:
            name = names.get(error.param or "", error.param)
            message = str(error)
            if error.param and name != error.param:
                message = message.replace(f"{error.param}=", f"{name}=", 1)
            raise RequestError(message, param=name, code=error.code) from error
        if asked is not None and asked > room:
            name = names.get("max_tokens", "max_tokens")
            raise RequestError(
                f"{name}={asked} is not allowed: the prompt has {prompt_tokens} tokens and the context is "
                f"{self._max_model_len} tokens long, so at most {room}",
                param=name,
                code="context_length_exceeded",
            )
        return params


def scores_only(request: CompletionRequest) -> bool:
    """Whether only the prompt's log probabilities are wanted, and no generated token."""
    return request.echo and request.max_tokens == 0
