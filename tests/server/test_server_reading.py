"""Request bodies: what is wrong with one is told in one sentence that names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piecework.errors import RequestError
from piecework.server.fields import HARMLESS, UNBUILT
from piecework.server.messages import normalise
from piecework.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest
from piecework.server.reading import parse, shorten

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> ChatRequest:
    return parse(ChatRequest, json.dumps({"messages": MESSAGES, **fields}).encode())


def refusal(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    return caught.value


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"  ",
        b"{",
        b"\xff\xfe",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": "\\ud800"}',
        b'{"prompt": "x"} x',
        b"[" * 100_000,
        b'{"prompt": ' + b"9" * 5000 + b"}",
        "{}".encode("utf-16"),
    ],
)
def test_a_body_that_is_not_json(body: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        parse(CompletionRequest, body)
    assert caught.value.code == "invalid_json"
    assert "body" in str(caught.value) and len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("body", "kind"), [(b"[]", "array"), (b'"a"', "string"), (b"1", "number"), (b"null", "null")]
)
def test_json_that_is_no_object(body: bytes, kind: str) -> None:
    with pytest.raises(RequestError, match=kind):
        parse(CompletionRequest, body)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("max_tokens", "5", "an integer"),
        ("max_tokens", 1.5, "an integer"),
        ("max_tokens", True, "an integer"),
        ("max_tokens", 10**30, "at most"),
        ("seed", -(10**30), "at least"),
        ("temperature", "hot", "a number"),
        ("temperature", True, "a number"),
        ("stream", "yes", "true or false"),
        ("stream", 1, "true or false"),
        ("stop", 7, "a string or a list of at most 128 strings"),
        ("stop", ["a", 7], "a string or a list of at most 128 strings"),
        ("stop", ["a"] * 129, "a string or a list of at most 128 strings"),
        ("logit_bias", [1], "an object that maps token ids"),
        ("logit_bias", {"1": "much"}, "an object that maps token ids"),
        ("messages", "hi", "a list of messages"),
        ("stream_options", True, "an object"),
        ("stop_token_ids", ["a"], "a list of token ids"),
        ("model", 5, "a string"),
    ],
)
def test_wrong_types_name_field_value_and_allowed(field: str, value: Any, allowed: str) -> None:
    error = refusal(**{field: value})
    assert error.param is not None and error.param.startswith(field)
    assert str(error).startswith(field) and allowed in str(error)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(RequestError, match="messages is missing") as caught:
        parse(ChatRequest, b"{}")
    assert (caught.value.param, caught.value.code) == ("messages", "missing_parameter")


def test_a_misspelt_field_gets_a_hint_and_a_strange_one_the_list() -> None:
    assert "did you mean temperature?" in str(refusal(temprature=1))
    strange = refusal(zzzzzz=1)
    assert strange.param == "zzzzzz" and "max_completion_tokens" in str(strange)
    assert len(str(refusal(**{"x" * 10_000: 1}))) < 1500


def test_null_counts_as_absent() -> None:
    request = chat(temperature=None, tools=None, response_format=None, zzzzzz=None)
    assert request.temperature is None


@pytest.mark.parametrize("field", sorted(HARMLESS))
def test_harmless_fields_are_ignored(field: str) -> None:
    assert chat(**{field: {"a": 1}}).messages == MESSAGES


@pytest.mark.parametrize("field", sorted(UNBUILT))
def test_fields_that_would_change_the_answer_are_refused_by_name(field: str) -> None:
    error = refusal(**{field: {"unheard": "of"}})
    assert error.param == field and field in str(error) and error.code == "unsupported_parameter"
    for off in UNBUILT[field]:
        assert chat(**{field: off}).messages == MESSAGES


def test_tools_need_tool_choice_none() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert refusal(tools=tools).param == "tools"
    assert refusal(tools=tools, tool_choice="auto").param == "tools"
    assert chat(tools=tools, tool_choice="none").messages == MESSAGES


def test_best_of_must_equal_n() -> None:
    assert chat(n=2, best_of=2).n == 2
    assert refusal(n=1, best_of=2).param == "best_of"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": ["user"], "content": "hi"}], "messages[0].role"),
        ([*MESSAGES, {"role": "robot", "content": "hi"}], "messages[1].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}],
            "messages[0].content[1].type",
        ),
        ([{"role": "user", "content": "hi", "colour": "red"}], "messages[0].colour"),
        ([{"role": "user", "content": "hi", "name": 5}], "messages[0].name"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls[0]"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_a_wrong_message_is_named_by_its_place(messages: list[Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        normalise(messages)
    assert caught.value.param == param and str(caught.value).startswith(param)


def test_messages_become_plain_strings() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    found = normalise(
        [
            {"role": "developer", "content": parts},
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
            {"role": "tool", "content": "1", "tool_call_id": "c1"},
        ]
    )
    assert found[0] == {"role": "system", "content": "ab"}
    assert found[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert found[2] == {"role": "tool", "content": "1", "tool_call_id": "c1"}


def test_values_in_messages_are_short() -> None:
    for value in ("x" * 10**6, [1] * 10**6, 10**5000, {str(i): i for i in range(10**4)}, [["y" * 10**6]]):
        assert len(shorten(value)) < 100


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
NAMES = sorted(
    {*ChatRequest.model_fields, *CompletionRequest.model_fields, *DetokenizeRequest.model_fields, *UNBUILT}
)


@settings(deadline=None, max_examples=150)
@given(st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=6), JSON, max_size=5))
def test_any_json_is_a_request_or_a_request_error(body: dict[str, Any]) -> None:
    raw = json.dumps(body).encode("utf-8", "surrogatepass")
    for model in (ChatRequest, CompletionRequest, DetokenizeRequest):
        try:
            request = parse(model, raw)
            if isinstance(request, ChatRequest):
                normalise(request.messages)
        except RequestError as error:
            assert str(error)
