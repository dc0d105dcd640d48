"""Encoding, decoding, and the text and bytes of single tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from piecework.errors import RequestError
from piecework.tokenizer.tokenizer import Tokenizer

TEXTS = [
    "Paris is the capital",
    "  two spaces, café 日本語 😀\n\ttab",
    "",
    "<|im_end|> written out",
    "a\x00b",
]


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize("text", [text.strip() for text in TEXTS])
def test_texts_survive_encoding_and_decoding(backends: dict[str, Backend], name: str, text: str) -> None:
    tokenizer = Tokenizer(backends[name])
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=name == "sentencepiece") == text


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece", "metaspace", "wordpiece"])
def test_ids_and_text_are_those_of_transformers(backends: dict[str, Backend], name: str) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_object=backends[name])
    ours = Tokenizer(Backend.from_str(backends[name].to_str()))
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
            for skip in (True, False):
                assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece", "metaspace"])
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=200, deadline=None)
def test_decoding_any_ids_equals_the_backend(
    backends: dict[str, Backend], name: str, data: st.DataObject, skip: bool
) -> None:
    backend = backends[name]
    ids = data.draw(st.lists(st.integers(0, backend.get_vocab_size() - 1), max_size=12))
    theirs = backend.decode(ids, skip_special_tokens=skip)
    if name == "sentencepiece" and "\ufffd" in theirs:
        theirs = sentencepiece_text(backend, ids, skip)
    assert Tokenizer(backend).decode(ids, skip) == theirs


def sentencepiece_text(backend: Backend, ids: list[int], skip: bool) -> str:
    """Sentencepiece's rule: in a run of byte tokens whole characters stay, each other byte is U+FFFD."""
    data = b""
    for token_id in ids:
        name = backend.id_to_token(token_id)
        if skip and name in ("<unk>", "<s>", "</s>"):
            continue
        is_byte = name.startswith("<0x") and len(name) == 6
        data += bytes([int(name[3:5], 16)]) if is_byte else name.replace("▁", " ").encode()
    text = ""
    while data:
        for length in range(1, 5):
            try:
                text += data[:length].decode()
                break
            except UnicodeDecodeError:
                continue
        else:
            length = 1
            text += "\ufffd"
        data = data[length:]
    return text.removeprefix(" ")


def test_ids_beyond_the_vocabulary_have_no_text(backends: dict[str, Backend]) -> None:
    for backend in backends.values():
        tokenizer = Tokenizer(backend)
        ids = tokenizer.encode("the capital", add_special_tokens=False)
        odd = [tokenizer.vocab_size + 5, *ids, 2**32, -1, 2**70]
        assert tokenizer.decode(odd) == tokenizer.decode(ids)
        for unknown in (tokenizer.vocab_size + 5, 2**32, -1):
            assert tokenizer.token(unknown) == ""
            assert tokenizer.token_bytes(unknown) == b""


def test_bytes_of_tokens_add_up_to_the_text(backends: dict[str, Backend]) -> None:
    text = "naïve 日本語 😀 text"
    for name, start in (("byte_level", ""), ("sentencepiece", " ")):
        tokenizer = Tokenizer(backends[name])
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(tokenizer.token_bytes(i) for i in ids).decode() == start + text


def test_a_token_that_is_half_a_character_is_named_by_its_bytes(
    byte_level_backend: Backend, sentencepiece_backend: Backend
) -> None:
    tokenizer = Tokenizer(sentencepiece_backend)
    half = sentencepiece_backend.token_to_id("<0xE2>")
    assert tokenizer.token(half) == "bytes:\\xe2"
    assert tokenizer.token_bytes(half) == b"\xe2"
    assert tokenizer.token(sentencepiece_backend.token_to_id("<0x41>")) == "A"
    tokenizer = Tokenizer(byte_level_backend)
    assert tokenizer.token(byte_level_backend.token_to_id("Ġ")) == " "
    assert tokenizer.token(byte_level_backend.token_to_id("<|im_end|>")) == "<|im_end|>"
    assert tokenizer.token_bytes(byte_level_backend.token_to_id("â")) == b"\xe2"
    added = byte_level_backend.token_to_id("<tool 工具>")
    assert tokenizer.token(added) == "<tool 工具>"


def test_every_token_has_the_bytes_that_the_backend_decodes(backends: dict[str, Backend]) -> None:
    for name in ("byte_level", "wordpiece"):
        tokenizer = Tokenizer(backends[name])
        for token_id in range(tokenizer.vocab_size):
            expected = backends[name].decode([token_id], skip_special_tokens=False)
            assert tokenizer.token_bytes(token_id).decode(errors="replace") == expected


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff", 7, None])
def test_what_is_no_unicode_text_is_refused(byte_level_backend: Backend, text: object) -> None:
    with pytest.raises(RequestError, match="prompt") as caught:
        Tokenizer(byte_level_backend).encode(text)  # type: ignore[arg-type]
    assert caught.value.param == "prompt"


def test_truncation_and_padding_of_the_file_do_not_apply(byte_level_backend: Backend) -> None:
    backend = Backend.from_str(byte_level_backend.to_str())
    backend.enable_truncation(3)
    backend.enable_padding(length=30)
    assert len(Tokenizer(backend).encode("The capital of France is Paris")) not in (3, 30)


def test_special_tokens_are_added_once_and_only_if_wanted(sentencepiece_backend: Backend) -> None:
    tokenizer = Tokenizer(sentencepiece_backend, bos_id=1, eos_ids=[2])
    with_bos = tokenizer.encode("the time")
    assert with_bos == [1, *tokenizer.encode("the time", add_special_tokens=False)]
    assert tokenizer.bos_id == 1 and tokenizer.eos_ids == (2,)
