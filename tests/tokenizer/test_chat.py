"""Chat templates give what transformers gives, and refuse what they can't render."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import chat_templates
import pytest
from tokenizers import Tokenizer as Backend

from piecework.errors import ModelError, RequestError
from piecework.tokenizer.tokenizer import Tokenizer

SPECIAL = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Says <how> the weather is & will be, é",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = {"function": {"name": "weather", "arguments": {"city": "Zürich <b>", "days": 2}}, "type": "function"}
CHATS: dict[str, list[dict[str, Any]]] = {
    "user": [{"role": "user", "content": " Hi  there\n"}],
    "system": [
        {"role": "system", "content": "Be brief. "},
        {"role": "user", "content": "Hi {{ bos_token }}"},
    ],
    "turns": [
        {"role": "user", "content": "1 < 2 & 'so on'"},
        {"role": "assistant", "content": "日本語", "reasoning_content": "\nhm\n", "tool_calls": None},
        {"role": "user", "content": "<|im_end|>"},
    ],
    "calls": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "sunny"},
    ],
    "thinking": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello", "reasoning_content": "\ngreet\n"},
    ],
}


def ours(backend: Backend, template: Any, variables: dict[str, Any] = SPECIAL) -> Tokenizer:
    return Tokenizer(backend, chat_template=template, template_variables=variables)


@pytest.mark.parametrize("template", sorted(chat_templates.ALL))
@pytest.mark.parametrize("chat", sorted(CHATS))
@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_prompts_are_those_of_transformers(
    byte_level_backend: Backend, template: str, chat: str, generate: bool, tools: list[dict[str, Any]] | None
) -> None:
    from transformers import PreTrainedTokenizerFast

    source = chat_templates.ALL[template]
    theirs = PreTrainedTokenizerFast(tokenizer_object=byte_level_backend, **SPECIAL, chat_template=source)
    mine = ours(byte_level_backend, source)
    extra = {"enable_thinking": False, "date_string": "2 Feb 2025"} if tools else {}
    arguments: dict[str, Any] = {"tools": tools, "add_generation_prompt": generate, **extra}
    try:
        expected = theirs.apply_chat_template(CHATS[chat], tokenize=False, **arguments)
    except Exception as error:
        with pytest.raises(RequestError, match="messages") as caught:
            mine.chat_prompt(CHATS[chat], **arguments)
        assert str(error) in str(caught.value)
        assert caught.value.param == "messages"
        return
    assert mine.chat_prompt(CHATS[chat], **arguments) == expected
    ids = theirs.apply_chat_template(CHATS[chat], return_dict=False, **arguments)
    assert mine.encode_chat(CHATS[chat], **arguments) == ids


def test_both_outcomes_of_the_comparison_occur(byte_level_backend: Backend) -> None:
    mine = ours(byte_level_backend, chat_templates.MISTRAL_LIKE)
    assert mine.chat_prompt(CHATS["turns"]).startswith("<|endoftext|>")
    with pytest.raises(RequestError, match="roles must alternate"):
        mine.chat_prompt(CHATS["system"])


def test_no_second_bos(sentencepiece_backend: Backend) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = ours(sentencepiece_backend, template, {"bos_token": "<s>"})
    assert tokenizer.encode("the")[0] == 1
    assert tokenizer.encode_chat([{"role": "user", "content": "the time"}]).count(1) == 1


def test_text_parts_are_joined(byte_level_backend: Backend) -> None:
    parts = [{"type": "text", "text": "Hello, "}, {"type": "text", "text": "you"}]
    tokenizer = ours(byte_level_backend, chat_templates.SMOLLM2)
    assert "Hello, you" in tokenizer.chat_prompt([{"role": "user", "content": parts}])


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "messages=[]"),
        ("Hi", "messages='Hi'"),
        (["Hi"], "messages[0]='Hi'"),
        ([{"content": "Hi"}], "messages[0].role=None"),
        ([{"role": "user"}], "messages[0].content=None"),
        ([{"role": "user", "content": 3}], "messages[0].content=3"),
        ([{"role": "user", "content": ["Hi"]}], "messages[0].content[0]='Hi'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text=None"),
        (
            [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}],
                }
            ],
            "messages[0].content[1].type='image_url'",
        ),
        ([{"role": "user", "content": "a", "extra": {"x": [object]}}], "messages[0].extra.x[0]=<class"),
    ],
)
def test_malformed_messages_are_refused_by_name(
    byte_level_backend: Backend, messages: Any, named: str
) -> None:
    with pytest.raises(RequestError) as caught:
        ours(byte_level_backend, chat_templates.SMOLLM2).chat_prompt(messages)
    assert str(caught.value).startswith(named)
    assert caught.value.param == named.split("=")[0]


@pytest.mark.parametrize("tools", ["weather", ["weather"], [{"call": print}]])
def test_malformed_tools_are_refused_by_name(byte_level_backend: Backend, tools: Any) -> None:
    with pytest.raises(RequestError, match="tools"):
        ours(byte_level_backend, chat_templates.QWEN3_LIKE).chat_prompt(CHATS["user"], tools=tools)


def test_lone_surrogates_in_messages_are_refused(byte_level_backend: Backend) -> None:
    tokenizer = ours(byte_level_backend, chat_templates.SMOLLM2)
    with pytest.raises(RequestError, match="surrogate U\\+D83D") as caught:
        tokenizer.encode_chat([{"role": "user", "content": "half \ud83d"}])
    assert caught.value.param == "messages"


def test_without_a_template_the_error_says_how_to_give_one(byte_level_backend: Backend) -> None:
    tokenizer = Tokenizer(byte_level_backend)
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="--chat-template") as caught:
        tokenizer.encode_chat(CHATS["user"])
    assert caught.value.param == "messages"


def test_named_templates(byte_level_backend: Backend) -> None:
    tokenizer = ours(byte_level_backend, {"default": "plain", "tool_use": "{{ tools | length }} tools"})
    assert tokenizer.chat_prompt(CHATS["user"]) == "plain"
    assert tokenizer.chat_prompt(CHATS["user"], tools=TOOLS) == "1 tools"
    with pytest.raises(ModelError, match=r"no 'default'.*tool_use"):
        ours(byte_level_backend, {"tool_use": "x"})


def test_a_broken_template_is_the_models_fault(byte_level_backend: Backend) -> None:
    with pytest.raises(ModelError, match="line 2"):
        ours(byte_level_backend, "first\n{% if %}").chat_prompt(CHATS["user"])


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ dict.__self__ }}{{ dict.mro() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].content | tojson(indent='x') + 1 }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].nothing.more }}",
        "{% for i in range(10000000) %}{% endfor %}",
    ],
)
def test_templates_stay_in_the_sandbox(byte_level_backend: Backend, template: str) -> None:
    with pytest.raises(RequestError, match="chat template") as caught:
        ours(byte_level_backend, template).chat_prompt(CHATS["user"])
    assert caught.value.param == "messages"


def test_rendering_does_not_import_transformers() -> None:
    code = (
        "import sys\n"
        "from piecework.tokenizer.chat import ChatTemplate\n"
        "template = ChatTemplate('{{ messages[0].content }}', {})\n"
        "text = template.render([{'role': 'user', 'content': 'Hi'}], None, True, {})\n"
        "assert text == 'Hi' and not {'transformers', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
