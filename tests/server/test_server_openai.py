"""The `openai` client against a running server: what it sends and what it gets."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest
from server_process import ServerProcess

MESSAGES: list[Any] = [{"role": "user", "content": "say the thing"}]
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture
def client(server: ServerProcess) -> openai.OpenAI:
    return server.openai


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(messages=MESSAGES, max_completion_tokens=12, **GREEDY)
    choice = answer.choices[0]
    assert answer.object == "chat.completion" and answer.model == "tiny" and answer.id.startswith("chatcmpl-")
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason == "length"
    usage = answer.usage
    assert usage is not None and usage.completion_tokens == 12
    assert usage.total_tokens == usage.prompt_tokens + 12
    assert usage.prompt_tokens_details is not None and usage.prompt_tokens_details.cached_tokens >= 0


def test_usage_says_what_was_cached(client: openai.OpenAI, server: ServerProcess) -> None:
    text = "what was said before is known " * 4
    before = server.metric("piecework_prefix_cached_tokens_total")
    answers = [client.completions.create(prompt=text, max_tokens=2, **GREEDY) for _ in range(2)]
    usage = [answer.usage for answer in answers]
    details = [found.prompt_tokens_details for found in usage if found is not None]
    cached = [found.cached_tokens for found in details if found is not None]
    assert cached[0] == 0 and cached[1] == (usage[0].prompt_tokens - 1) // 16 * 16 > 0  # type: ignore[union-attr]
    assert server.metric("piecework_prefix_cached_tokens_total") == before + cached[1]
    assert answers[0].choices[0].text == answers[1].choices[0].text


def test_a_chat_is_a_completion_of_its_rendered_prompt(client: openai.OpenAI) -> None:
    prompt = "<|im_start|>user\nsay the thing<|im_end|>\n<|im_start|>assistant\n"
    chat = client.chat.completions.create(messages=MESSAGES, max_tokens=10, **GREEDY)
    text = client.completions.create(prompt=prompt, max_tokens=10, **GREEDY)
    assert text.choices[0].text == chat.choices[0].message.content
    assert text.usage is not None and chat.usage is not None
    assert text.usage.prompt_tokens == chat.usage.prompt_tokens


def test_the_last_message_can_be_continued(client: openai.OpenAI, server: ServerProcess) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "The thing is "}]
    body = {"messages": messages, "continue_final_message": True}
    ids = server.post("/tokenize", body).json()["tokens"]
    text = server.post("/detokenize", {"tokens": ids}).json()["prompt"]
    assert text.endswith("<|im_start|>assistant\nThe thing is ")
    refused = server.post("/tokenize", {"messages": MESSAGES, "continue_final_message": True})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "continue_final_message"


def test_streaming_with_usage(client: openai.OpenAI) -> None:
    options = {"messages": MESSAGES, "max_tokens": 12, **GREEDY}
    whole = client.chat.completions.create(**options)
    chunks = list(
        client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
    assert reasons[-1] == "length" and set(reasons[:-1]) == {None}
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 12
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_stop_strings_end_the_text(client: openai.OpenAI) -> None:
    options = {"prompt": "one two three", "max_tokens": 60, **GREEDY}
    text = client.completions.create(**options).choices[0].text
    stop = text[len(text) // 2 :][:3]
    cut = client.completions.create(**options, stop=["never in there", stop]).choices[0]
    assert cut.text == text[: text.index(stop)]
    assert cut.finish_reason == "stop" and cut.stop_reason == stop  # type: ignore[attr-defined]
    streamed = client.completions.create(**options, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == cut.text
    extra = {**GREEDY["extra_body"], "include_stop_str_in_output": True}
    kept = client.completions.create(**{**options, "extra_body": extra}, stop=stop).choices[0]
    assert kept.text == cut.text + stop


def test_two_samples_interleave_in_a_stream(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"messages": MESSAGES, "model": "tiny", "max_tokens": 20, "n": 2, "seed": 5}
    whole = client.chat.completions.create(**options)
    texts = ["", ""]
    order = []
    roles = []
    for chunk in client.chat.completions.create(**options, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        order.append(choice.index)
        roles += [choice.index] if choice.delta.role else []
    assert texts == [choice.message.content for choice in whole.choices]
    assert texts[0] != texts[1]
    assert sorted(roles) == [0, 1]
    assert order != sorted(order)


def test_a_seed_repeats_a_sample(client: openai.OpenAI) -> None:
    def sample(seed: int) -> str | None:
        answer = client.chat.completions.create(messages=MESSAGES, model="tiny", max_tokens=16, seed=seed)
        return answer.choices[0].message.content

    assert sample(1) == sample(1)
    assert len({sample(seed) for seed in range(4)}) > 1


def test_chat_logprobs(client: openai.OpenAI) -> None:
    options = {"messages": MESSAGES, "max_tokens": 6, "logprobs": True, "top_logprobs": 3, **GREEDY}
    answer = client.chat.completions.create(**options)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and len(logprobs.content) == 6
    for entry in logprobs.content:
        assert next(top.token for top in entry.top_logprobs) == entry.token
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 3 and values == sorted(values, reverse=True)
        assert entry.logprob == values[0] <= 0 and sum(map(math.exp, values)) <= 1 + 1e-6
    raw = b"".join(bytes(entry.bytes or ()) for entry in logprobs.content)
    assert raw.decode(errors="replace") == answer.choices[0].message.content
    streamed = [
        entry.token
        for chunk in client.chat.completions.create(**options, stream=True)
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content or ()
    ]
    assert streamed == [entry.token for entry in logprobs.content]


def test_completion_logprobs_and_echo(client: openai.OpenAI) -> None:
    options = {"prompt": "the cat", "max_tokens": 5, "logprobs": 2, **GREEDY}
    plain = client.completions.create(**options).choices[0]
    echoed = client.completions.create(**options, echo=True).choices[0]
    assert echoed.text == "the cat" + plain.text
    assert plain.logprobs is not None and echoed.logprobs is not None
    own, all_ = plain.logprobs, echoed.logprobs
    assert own.tokens is not None and all_.tokens is not None and len(own.tokens) == 5
    assert all_.tokens[-5:] == own.tokens and "".join(all_.tokens[:-5]) == "the cat"
    assert all_.token_logprobs is not None and all_.token_logprobs[0] is None  # type: ignore[comparison-overlap]
    assert all(value <= 0 for value in all_.token_logprobs[1:])
    assert all_.token_logprobs[-5:] == pytest.approx(own.token_logprobs, abs=1e-4)
    assert own.top_logprobs is not None
    for token, value, best in zip(own.tokens, own.token_logprobs or (), own.top_logprobs, strict=True):
        assert 1 <= len(best) <= 3 and best[token] == value
    assert own.text_offset is not None and own.text_offset[0] == 0
    assert all_.text_offset is not None and all_.text_offset[-5] == len("the cat")

    joined: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "text_offset": []}
    text = ""
    for chunk in client.completions.create(**options, echo=True, stream=True):
        text += chunk.choices[0].text
        for name, values in joined.items():
            values += getattr(chunk.choices[0].logprobs, name, None) or ()
    assert text == echoed.text
    assert joined["tokens"] == all_.tokens and joined["text_offset"] == all_.text_offset


def test_a_prompt_can_be_scored_without_generating(client: openai.OpenAI) -> None:
    options = {"model": "tiny", "prompt": "the cat", "logprobs": 1, "echo": True}
    scored = client.completions.create(**options, max_tokens=0)
    longer = client.completions.create(**options, max_tokens=2)
    assert scored.choices[0].text == "the cat" and scored.choices[0].finish_reason == "length"
    assert scored.usage is not None and scored.usage.completion_tokens == 0
    first, second = scored.choices[0].logprobs, longer.choices[0].logprobs
    assert first is not None and second is not None and first.tokens and second.tokens
    assert second.tokens[: len(first.tokens)] == first.tokens
    assert first.token_logprobs is not None and second.token_logprobs is not None
    assert first.token_logprobs[1:] == pytest.approx(second.token_logprobs[1 : len(first.tokens)])


def test_prompt_logprobs_in_vllm_form(client: openai.OpenAI, server: ServerProcess) -> None:
    body = {"prompt": "the cat", "max_tokens": 1, "prompt_logprobs": 2}
    choice = server.post("/v1/completions", body).json()["choices"][0]
    ids = server.post("/tokenize", {"prompt": "the cat"}).json()["tokens"]
    scores = choice["prompt_logprobs"]
    assert scores[0] is None and len(scores) == len(ids)
    for token, entry in zip(ids[1:], scores[1:], strict=True):
        assert str(token) in entry and 2 <= len(entry) <= 3
        assert {value["rank"] for value in entry.values()} <= {1, 2, None}
    assert choice["logprobs"] is None
    chat = server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1, "prompt_logprobs": 0})
    assert chat.json()["prompt_logprobs"][0] is None


def test_every_form_of_prompt(client: openai.OpenAI, server: ServerProcess) -> None:
    texts = ["the cat", "on the mat"]
    ids = [server.post("/tokenize", {"prompt": text}).json()["tokens"] for text in texts]

    def run(prompt: Any, **more: Any) -> list[str]:
        answer = client.completions.create(prompt=prompt, max_tokens=8, **GREEDY, **more)
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        assert answer.usage is not None and answer.usage.completion_tokens == 8 * len(answer.choices)
        return [choice.text for choice in answer.choices]

    alone = [run(text)[0] for text in texts]
    assert run(texts) == run(ids) == alone
    assert run(ids[0]) == [alone[0]]
    assert run(texts, n=2) == [alone[0], alone[0], alone[1], alone[1]]


def test_logit_bias_and_stop_tokens(client: openai.OpenAI, server: ServerProcess) -> None:
    token = server.post("/tokenize", {"prompt": "q"}).json()["tokens"][0]
    options = {"prompt": "abc", "max_tokens": 4, "logit_bias": {str(token): 100}, **GREEDY}
    assert client.completions.create(**options).choices[0].text == "qqqq"
    body = {"prompt": "abc", "max_tokens": 4, "temperature": 0, "logit_bias": {str(token): 100}}
    choice = server.post("/v1/completions", body | {"stop_token_ids": [token]}).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", token)
    choice = server.post("/v1/completions", body | {"stop_token_ids": [token], "min_tokens": 3}).json()[
        "choices"
    ][0]
    assert choice["stop_reason"] != token or len(choice["text"]) >= 2


def test_models_and_the_rest(client: openai.OpenAI, server: ServerProcess) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == ["tiny"] and models[0].max_model_len == 4096  # type: ignore[attr-defined]
    assert client.models.retrieve("tiny").id == "tiny"
    health = server.get("/health")
    assert health.status_code == 200 and health.json()["status"] == "ok" and health.json()["device"] == "cpu"
    assert "version" in server.get("/version").json()
    text = "Grüße, the cat 🐈"
    tokens = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert server.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": text}


def test_the_profile_is_switched_over_http(server: ServerProcess) -> None:
    assert server.post("/start_profile").json() == {"status": "profiling"}
    server.post("/v1/completions", {"prompt": "abc", "max_tokens": 3})
    profile = server.post("/stop_profile").json()["profile"]
    assert profile["timers"]
    name = next(iter(profile["timers"]))
    assert (
        server.metric(f'piecework_profile_calls_total{{timer="{name}"}}') == profile["timers"][name]["count"]
    )
    server.post("/v1/completions", {"prompt": "abc", "max_tokens": 3})
    assert server.post("/stop_profile").json()["profile"] == profile


def test_metrics_count_what_was_done(client: openai.OpenAI, server: ServerProcess) -> None:
    names = [
        "piecework_generation_tokens_total",
        "piecework_prompt_tokens_total",
        'piecework_requests_total{finish_reason="length"}',
        "piecework_time_to_first_token_seconds_count",
        "piecework_inter_token_latency_seconds_count",
        "piecework_e2e_request_latency_seconds_count",
        'piecework_http_requests_total{method="POST",route="/v1/completions",status="200"}',
    ]
    before = [server.metric(name) for name in names]
    client.completions.create(prompt="abcd", max_tokens=7, **GREEDY)
    after = [server.metric(name) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [7, 4, 1, 1, 6, 1, 1]
    assert server.metric("piecework_kv_pages") >= 1000
    info = next(
        line for line in server.get("/metrics").text.splitlines() if line.startswith("piecework_info{")
    )
    assert 'model="tiny"' in info and 'device="cpu"' in info
