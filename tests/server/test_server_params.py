"""Sampling parameters from request fields: names, limits and the room that the context leaves."""

from __future__ import annotations

from typing import Any

import pytest

from piecework.errors import RequestError
from piecework.sampling import SamplingParams
from piecework.server.params import ParamsReader
from piecework.server.protocol import ChatRequest, CompletionRequest

READER = ParamsReader(SamplingParams(temperature=0.6, top_k=40), vocab_size=100, max_model_len=64)
MESSAGES = [{"role": "user", "content": "hi"}]


def chat(prompt_tokens: int = 10, **fields: Any) -> SamplingParams:
    return READER.chat(ChatRequest(messages=MESSAGES, **fields), prompt_tokens)


def completion(prompt_tokens: int = 10, **fields: Any) -> SamplingParams:
    return READER.completion(CompletionRequest(prompt="x", **fields), prompt_tokens)


def test_defaults_of_the_model_hold_until_the_client_says_otherwise() -> None:
    params = chat()
    assert (params.temperature, params.top_k) == (0.6, 40)
    params = chat(temperature=0.0, top_k=-1, stop="x", seed=7, n=3)
    assert (params.temperature, params.top_k, params.stop, params.seed, params.n) == (0.0, -1, ("x",), 7, 3)


def test_max_tokens_fills_the_context_in_chat_and_is_16_in_completions() -> None:
    assert chat(10).max_tokens == 54
    assert completion(10).max_tokens == 16
    assert completion(60).max_tokens == 4  # clamped: nobody asked for 16


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_an_explicit_limit_must_fit_and_is_named_as_the_client_named_it(name: str) -> None:
    assert chat(10, **{name: 54}).max_tokens == 54
    with pytest.raises(RequestError) as caught:
        chat(10, **{name: 55})
    assert caught.value.param == name and caught.value.code == "context_length_exceeded"
    assert all(number in str(caught.value) for number in ("55", "10", "64", "54"))
    with pytest.raises(RequestError, match=f"{name}=-1") as caught:
        chat(10, **{name: -1})
    assert caught.value.param == name


def test_two_limits_must_agree() -> None:
    assert chat(max_tokens=5, max_completion_tokens=5).max_tokens == 5
    with pytest.raises(RequestError, match="max_completion_tokens=6"):
        chat(max_tokens=5, max_completion_tokens=6)


def test_logprobs_in_both_forms() -> None:
    assert chat().logprobs is None
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).logprobs == 4
    assert completion(logprobs=3).logprobs == 3
    assert completion(logprobs=3).prompt_logprobs is None
    assert completion(logprobs=3, echo=True).prompt_logprobs == 3
    with pytest.raises(RequestError) as caught:
        chat(top_logprobs=4)
    assert caught.value.param == "top_logprobs"
    with pytest.raises(RequestError, match="top_logprobs=21") as caught:
        chat(logprobs=True, top_logprobs=21)
    assert caught.value.param == "top_logprobs"


def test_max_tokens_zero_only_scores_an_echoed_prompt() -> None:
    assert completion(max_tokens=0, echo=True).max_tokens == 1
    for asked in (0, -3):
        with pytest.raises(
            RequestError, match=f"max_tokens={asked} .*at least 1, or 0 with echo=true$"
        ) as caught:
            completion(max_tokens=asked)
        assert caught.value.param == "max_tokens" and caught.value.code == "invalid_value"
    with pytest.raises(RequestError, match=r"max_tokens=-3 .*at least 0, as echo=true$"):
        completion(max_tokens=-3, echo=True)
    with pytest.raises(RequestError, match=r"max_tokens=0 .*an integer of at least 1$"):
        chat(max_tokens=0)


def test_logit_bias_and_stop_tokens_are_ids_of_the_vocabulary() -> None:
    assert chat(logit_bias={"99": 1.0, "0": -100}).logit_bias == {99: 1.0, 0: -100}
    for key in ("100", "-1", "x", "1.0", "", "\u0663", "9" * 5000):
        with pytest.raises(RequestError) as caught:
            chat(logit_bias={key: 1.0})
        assert caught.value.param == "logit_bias" and len(str(caught.value)) < 250
    with pytest.raises(RequestError, match="-100 and at most 100"):
        chat(logit_bias={"1": 101.0})
    with pytest.raises(RequestError, match="stop_token_ids holds 100"):
        chat(stop_token_ids=[100])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("n", 0),
        ("n", 10**6),
        ("presence_penalty", 2.5),
        ("min_p", -1.0),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-300),
        ("repetition_penalty", 1e300),
        ("min_tokens", -1),
        ("stop", [""]),
    ],
)
def test_ranges_name_the_field(field: str, value: Any) -> None:
    for make in (chat, completion):
        with pytest.raises(RequestError) as caught:
            make(**{field: value})
        assert caught.value.param == field and str(caught.value).startswith(field)


def test_stream_options_need_a_stream() -> None:
    with pytest.raises(RequestError) as caught:
        chat(stream_options={"include_usage": True})
    assert caught.value.param == "stream_options"
    assert chat(stream=True, stream_options={"include_usage": True}).n == 1
