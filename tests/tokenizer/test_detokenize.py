"""Text from tokens as they come: whole characters, and at the end exactly the decoded text."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from piecework.tokenizer.detokenize import Detokenizer
from piecework.tokenizer.tokenizer import Tokenizer

KINDS = ["byte_level", "sentencepiece", "metaspace", "wordpiece"]


def stream(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push(token_id)[0] for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize("name", KINDS)
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=200, deadline=None)
def test_joined_deltas_are_the_decoded_text(
    backends: dict[str, Backend], name: str, data: st.DataObject, skip: bool
) -> None:
    tokenizer = Tokenizer(backends[name])
    ids = st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=16)
    prompt, output = data.draw(ids), data.draw(ids)
    # What the prompt shows for itself: a character that it only begins belongs to the output.
    shown = Detokenizer(tokenizer, skip_special_tokens=skip)
    before = "".join(shown.push(token_id)[0] for token_id in prompt)
    deltas = stream(Detokenizer(tokenizer, prompt, skip_special_tokens=skip), output)
    assert before + "".join(deltas) == tokenizer.decode(prompt + output, skip)


@pytest.mark.parametrize("name", KINDS)
@given(text=st.text(max_size=30))
@settings(max_examples=100, deadline=None)
def test_no_delta_ends_within_a_character(backends: dict[str, Backend], name: str, text: str) -> None:
    tokenizer = Tokenizer(backends[name])
    ids = tokenizer.encode(text.replace("\ufffd", ""), add_special_tokens=False)
    deltas = stream(Detokenizer(tokenizer), ids)
    assert "\ufffd" not in "".join(deltas)
    assert "".join(deltas) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_a_character_comes_with_its_last_byte(backends: dict[str, Backend], name: str) -> None:
    tokenizer = Tokenizer(backends[name])
    table = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
    ids = [table[bytes([byte])] for byte in "😀".encode()]
    detokenizer = Detokenizer(tokenizer, tokenizer.encode("the"))
    assert [detokenizer.push(token_id)[0] for token_id in ids] == ["", "", "", "😀"]
    half = Detokenizer(tokenizer, tokenizer.encode("the"))
    assert [half.push(token_id)[0] for token_id in ids[:3]] == ["", "", ""]
    assert half.flush() == tokenizer.decode(ids[:3])
    assert set(tokenizer.decode(ids[:3])) == {"\ufffd"}


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_a_character_that_the_prompt_begins_comes_with_the_output(
    backends: dict[str, Backend], name: str
) -> None:
    tokenizer = Tokenizer(backends[name])
    table = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
    ids = [table[bytes([byte])] for byte in "é".encode()]
    detokenizer = Detokenizer(tokenizer, [*tokenizer.encode("the time"), ids[0]])
    assert detokenizer.push(ids[1]) == ("é", None)


def test_the_space_of_the_first_word_depends_on_the_prompt(sentencepiece_backend: Backend) -> None:
    tokenizer = Tokenizer(sentencepiece_backend)
    ids = tokenizer.encode("the time", add_special_tokens=False)
    assert "".join(stream(Detokenizer(tokenizer), ids)) == "the time"
    assert "".join(stream(Detokenizer(tokenizer, [1]), ids)) == "the time"
    assert "".join(stream(Detokenizer(tokenizer, tokenizer.encode("upon")), ids)) == " the time"


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_decoder_that_drops_several_spaces(sentencepiece_backend: Backend, data: st.DataObject) -> None:
    backend = Backend.from_str(sentencepiece_backend.to_str())
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 3, 0)]
    backend.decoder = decoders.Sequence(steps)
    tokenizer = Tokenizer(backend)
    words = [backend.token_to_id(name) for name in ("▁", "<0x20>", "▁the", "a")]
    ids = data.draw(st.lists(st.sampled_from(words), max_size=10))
    cut = data.draw(st.integers(0, len(ids)))
    assert tokenizer.decode(ids) == backend.decode(ids)
    output = "".join(stream(Detokenizer(tokenizer, ids[:cut]), ids[cut:]))
    assert backend.decode(ids[:cut]) + output == backend.decode(ids)


def test_special_tokens_are_shown_only_if_wanted(byte_level_backend: Backend) -> None:
    tokenizer = Tokenizer(byte_level_backend)
    ids = tokenizer.encode("Paris<|im_end|>")
    assert "".join(stream(Detokenizer(tokenizer), ids)) == "Paris"
    assert "".join(stream(Detokenizer(tokenizer, skip_special_tokens=False), ids)) == "Paris<|im_end|>"


def test_stop_strings_cross_tokens(byte_level_backend: Backend) -> None:
    tokenizer = Tokenizer(byte_level_backend)
    ids = tokenizer.encode("The capital of France is Paris, and the river")
    for include in (False, True):
        detokenizer = Detokenizer(tokenizer, stop=("is Pa", "zzz"), include_stop=include)
        text, found = "", None
        for token_id in ids:
            delta, found = detokenizer.push(token_id)
            text += delta
            if found:
                break
        assert found == "is Pa"
        assert text + detokenizer.flush() == "The capital of France " + ("is Pa" if include else "")
        assert detokenizer.push(ids[0]) == ("", None)


def test_text_that_might_begin_a_stop_string_waits(byte_level_backend: Backend) -> None:
    tokenizer = Tokenizer(byte_level_backend)
    detokenizer = Detokenizer(tokenizer, stop=("Paris!",))
    seen = "".join(detokenizer.push(i)[0] for i in tokenizer.encode("is Paris"))
    assert seen == "is "
    assert detokenizer.flush() == "Paris"


def test_stop_strings_before_min_tokens_are_plain_text(byte_level_backend: Backend) -> None:
    tokenizer = Tokenizer(byte_level_backend)
    detokenizer = Detokenizer(tokenizer, stop=("Pa",))
    results = [detokenizer.push(i, check_stop=False) for i in tokenizer.encode("Paris Pa")]
    assert all(found is None for _, found in results)
    late = [detokenizer.push(i) for i in tokenizer.encode(" Pa")]
    assert late[-1][1] == "Pa"
    assert "".join(text for text, _ in results + late) == "Paris Pa "


def test_half_a_character_at_the_end_joins_held_text(byte_level_backend: Backend) -> None:
    tokenizer = Tokenizer(byte_level_backend)
    table = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    detokenizer = Detokenizer(tokenizer, stop=("ab",))
    assert detokenizer.push(table[b"a"]) == ("", None)
    assert detokenizer.push(table[b"\xe6"]) == ("", None)
    assert detokenizer.flush() == "a\ufffd"


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_time_a_token_does_not_grow_with_prompt_or_output(backends: dict[str, Backend], name: str) -> None:
    tokenizer = Tokenizer(backends[name])
    ids = tokenizer.encode("once upon a time ", add_special_tokens=False)
    table = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    ids += [table[b"\xff"]] * 50  # never a character

    def seconds(repeats: int) -> float:
        best = float("inf")
        for _ in range(3):
            start = time.thread_time()
            detokenizer = Detokenizer(tokenizer, ids * repeats, stop=("never",))
            for token_id in ids * repeats:
                detokenizer.push(token_id)
            best = min(best, time.thread_time() - start)
        return best

    assert seconds(160) < 16 * 3 * seconds(10) + 0.05
