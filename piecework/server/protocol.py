"""The request bodies, field by field. Types are strict; ranges are checked by `SamplingParams`.

Names and meanings are the OpenAI API's; the second half of `SamplingFields` are the extras that vLLM
and SGLang clients send. Null counts as absent. See `fields.py` for what is ignored and refused.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Integer = Annotated[int, Field(ge=-(2**63), le=2**64 - 1)]
"""A JSON integer that fits into 64 bits; larger ones are a mistake wherever they appear."""


MAX_STOPS = 128
"""Stop strings of one request. Each is looked for after every token, in the thread that serves all."""


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class Body(BaseModel):
    """Base of all request bodies: no conversion between types, no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    model: str | None = None


class StreamOptions(BaseModel):
    """`include_usage` adds a last chunk with the token counts and without choices."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool = False
    include_obfuscation: bool | None = None


class SamplingFields(Body):
    """What chat and text completions share."""

    temperature: float | None = None
    top_p: float | None = None
    n: Integer | None = None
    max_tokens: Integer | None = None
    stop: Annotated[list[str], BeforeValidator(_listed)] | None = Field(
        None, max_length=MAX_STOPS, description=f"a string or a list of at most {MAX_STOPS} strings"
    )
    seed: Integer | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(
        None, description="an object that maps token ids (as strings) to numbers from -100 to 100"
    )
    stream: bool = False
    stream_options: StreamOptions | None = None

    top_k: Integer | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Integer | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[Integer] | None = Field(None, description="a list of token ids")
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: Integer | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that holds the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChatTemplateFields(BaseModel):
    """How messages become a prompt."""

    messages: list[Any] = Field(description="a list of messages")
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class ChatRequest(SamplingFields, ChatTemplateFields):
    """POST /v1/chat/completions."""

    logprobs: bool | None = None
    top_logprobs: Integer | None = None
    max_completion_tokens: Integer | None = None


class CompletionRequest(SamplingFields):
    """POST /v1/completions. `prompt` is checked where it is taken apart (prompts.py)."""

    prompt: Any
    echo: bool = False
    logprobs: Integer | None = None
    add_special_tokens: bool = True


class TokenizeRequest(Body):
    """POST /tokenize: `prompt`, or `messages` that go through the chat template first."""

    prompt: str | None = None
    messages: list[Any] | None = Field(None, description="a list of messages")
    add_special_tokens: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    """POST /detokenize."""

    tokens: list[Integer] = Field(description="a list of token ids")
    skip_special_tokens: bool = False


class DeviceRequest(Body):
    """POST /admin/device."""

    device: str


class KVRequest(Body):
    """POST /admin/kv."""

    pages: Integer
