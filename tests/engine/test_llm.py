"""The offline API refuses what is no prompt, and takes what is one."""

from __future__ import annotations

import pytest

from piecework import LLM
from piecework.errors import ModelError, RequestError
from piecework.sampling import SamplingParams
from piecework.tokenizer.detokenize import Detokenizer


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(str(folder), dtype="float32", threads=1) as made:
        yield made


@pytest.mark.parametrize("prompts", [None, 5, [1.5], ["a", 5], [None], b"abc", [True]])
def test_what_is_no_prompt_is_refused_by_name(llm, prompts):
    with pytest.raises(RequestError, match="prompt"):
        llm.generate(prompts, max_tokens=1)


def test_texts_and_ids_alone_and_in_lists(llm):
    ids = llm.service.tokenizer.encode("the inner")
    forms = ("the inner", ["the inner"], ids, [ids])
    found = [llm.generate(form, max_tokens=3, temperature=0, ignore_eos=True) for form in forms]
    assert {tuple(results[0].token_ids) for results in found} == {tuple(found[0][0].token_ids)}
    messages = [{"role": "user", "content": "hello"}]
    one, two = (llm.chat(m, max_tokens=2, temperature=0)[0].token_ids for m in (messages, [messages]))
    assert one == two
    assert [d.index for d in llm.stream("the", max_tokens=2, ignore_eos=True)] == [0, 0]


def test_params_of_each_prompt(llm):
    two = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (2, 5)]
    found = llm.generate(["the inner", "the"], two)
    alone = [llm.generate(p, own)[0] for p, own in zip(["the inner", "the"], two, strict=True)]
    assert [len(one.token_ids) for one in found] == [2, 5]
    assert [one.token_ids for one in found] == [one.token_ids for one in alone]
    assert [one.index for one in llm.generate(["the", "a"], two, n=2)] == [0, 1, 0, 1]  # `changes` are of all
    messages = [{"role": "user", "content": "hello"}]
    assert [len(one.token_ids) for one in llm.chat([messages, messages], two)] == [2, 5]
    assert llm.generate([], []) == []


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ([SamplingParams()], "params has 1 entries, and there are 2 prompts"),
        ([SamplingParams(), {"n": 1}], "params={'n': 1} is not allowed: SamplingParams"),
        ({"n": 1}, "params={'n': 1} is not allowed: SamplingParams, or a list of them"),
    ],
)
def test_what_are_no_params_is_refused_by_name(llm, params, allowed):
    with pytest.raises(RequestError) as error:
        llm.generate(["a", "b"], params)
    assert allowed in str(error.value) and error.value.param == "params"
    with pytest.raises(RequestError, match=r"is not allowed: SamplingParams$"):
        next(llm.stream("a", [SamplingParams()]))


def test_a_request_whose_text_cannot_be_made_ends_with_the_reason(llm, monkeypatch):
    def fail(self, token_id, check_stop=True):
        raise ValueError("planned failure")

    with monkeypatch.context() as patched:
        patched.setattr(Detokenizer, "push", fail)
        (failed,) = llm.generate("a", max_tokens=20, temperature=0, ignore_eos=True)
    assert failed.finish_reason == "error" and "planned failure" in failed.error
    (next_one,) = llm.generate("a", max_tokens=20, temperature=0, ignore_eos=True)
    assert next_one.finish_reason == "length" and llm.service.health()["status"] == "ok"
    assert llm.service.stats().kv_pages_used == 0


@pytest.mark.parametrize("text", ["[]", '{"architectures": ["LlamaForCausalLM"], "num_attention_heads": 0}'])
def test_a_wrong_config_is_named_before_the_tokenizer_is_read(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "tokenizer.json").write_text("no json")
    with pytest.raises((ModelError, ValueError)) as error:
        LLM(str(tmp_path))
    assert "tokenizer" not in str(error.value)
