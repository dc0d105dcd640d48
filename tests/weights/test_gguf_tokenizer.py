"""The tokenizer that a GGUF file holds encodes as the one that the model was trained with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from spm import SPECIAL, encode, spm_metadata
from texts import DIGITS, HARD_TEXTS
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from piecework.errors import ModelError
from piecework.weights import gguf
from piecework.weights.gguf.header import read_header
from piecework.weights.gguf.pretokenize import KINDS, backend_pre_tokenizer

TENSORS = {"token_embd.weight": np.ones((4, 32), np.float32)}
NONE = 2**32 - 1  # how converters write that there is no such token
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def bpe_metadata(pre: str | None = "gpt-2", **more: Any) -> dict[str, Any]:
    """A byte-level vocabulary: two control tokens, a user-defined one, the bytes and a few merges."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ Ġ", "Ċ Ċ", "1 2", "12 3", "Ġ 1", "Ã ©"]
    tokens = ["<|bos|>", "<|im_end|>", "<think>", *ALPHABET, *(m.replace(" ", "") for m in merges), "Ġwhole"]
    values = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [3, 3, 4] + [1] * (len(tokens) - 3),
        "merges": merges,
        "bos_token_id": 0,
        **more,
    }
    named = {f"tokenizer.ggml.{name}": v for name, v in values.items() if v is not None}
    return {**named, "tokenizer.chat_template": "{{ messages }}"}


def built(tmp_path: Path, metadata: dict[str, Any]) -> tuple[Tokenizer, gguf.TokenizerMeta]:
    path = write_gguf(tmp_path / "m.gguf", "llama", metadata, TENSORS)
    return gguf.tokenizer_data(path, tmp_path / "cache")


def test_special_tokens_ids_and_template(tmp_path: Path) -> None:
    tokenizer, meta = built(tmp_path, bpe_metadata(eos_token_id=0, eom_token_id=5, padding_token_id=NONE))
    assert meta == {
        "bos_id": 0,
        "eos_ids": [0, 1, 5],  # eos, the end of turn that the vocabulary shows, eom
        "pad_id": None,
        "unk_id": None,
        "add_bos": False,
        "add_eos": False,
        "chat_template": "{{ messages }}",
    }
    ids = tokenizer.encode("hello<|im_end|><think>é").ids
    assert [tokenizer.id_to_token(i) for i in ids] == ["hello", "<|im_end|>", "<think>", "Ã©"]
    assert tokenizer.decode(ids) == "hello<think>é"  # a user-defined token is no special one
    assert tokenizer.decode(ids, skip_special_tokens=False) == "hello<|im_end|><think>é"
    assert tokenizer.get_vocab_size() == len(bpe_metadata()["tokenizer.ggml.tokens"])


@pytest.mark.parametrize(
    ("pre", "more", "first", "last"),
    [
        ("gpt-2", {}, [], []),
        ("gpt-2", {"add_bos_token": True}, [0], []),
        ("llama-bpe", {}, [0], []),
        ("llama-bpe", {"add_bos_token": False}, [], []),
        ("llama-bpe", {"add_eos_token": True, "eos_token_id": 1}, [0], [1]),
        ("llama-bpe", {"bos_token_id": None}, [], []),
    ],
)
def test_bos_and_eos_are_added_as_the_file_says(
    tmp_path: Path, pre: str, more: dict[str, Any], first: list[int], last: list[int]
) -> None:
    tokenizer, meta = built(tmp_path, bpe_metadata(pre, **more))
    plain = tokenizer.encode("hello 12", add_special_tokens=False).ids
    assert tokenizer.encode("hello 12").ids == first + plain + last
    assert meta["add_bos"] == more.get("add_bos_token", pre == "llama-bpe")


def test_whole_words_are_taken_without_merges_where_the_kind_says_so(tmp_path: Path) -> None:
    for pre, count in (("gpt-2", 6), ("llama-bpe", 1)):
        (tmp_path / pre).mkdir()
        tokenizer, _ = built(tmp_path / pre, bpe_metadata(pre))
        assert len(tokenizer.encode(" whole", add_special_tokens=False).ids) == count


@pytest.mark.parametrize(
    ("kinds", "text", "pieces"),
    [
        ("gpt-2", "a  1 it's 123\n b", ["a", " ", " 1", " it", "'s", " 123", "\n", " b"]),
        ("smollm", "a  1 it's 123\n b", ["a", "  ", "1", " it", "'s", " ", "1", "2", "3", "\n", " b"]),
        ("llama-bpe", "a  1 IT'S 1234\n b", ["a", " ", " ", "1", " IT", "'S", " ", "123", "4", "\n", " b"]),
        ("qwen2", "a  1 IT'S 123\n b", ["a", " ", " ", "1", " IT", "'S", " ", "1", "2", "3", "\n", " b"]),
        ("tekken", "aB 12\n b", ["a", "B", " ", "1", "2", "\n", " b"]),
        ("gpt-4o", "aB's 1234/\n b", ["a", "B's", " ", "123", "4", "/\n", " b"]),
        ("falcon", "a=b 12345", ["a", "=", "b", " ", "123", "45"]),
        ("default", "a+b 12345", ["a", "+", "b", " ", "123", "45"]),
    ],
)
def test_pieces_of_each_kind(kinds: str, text: str, pieces: list[str]) -> None:
    split = backend_pre_tokenizer(KINDS[kinds]).pre_tokenize_str(text)
    assert [text[a:b] for _, (a, b) in split] == pieces


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken", "gpt-4o", "gpt-2"])
def test_pieces_are_those_of_transformers(tmp_path: Path, pre: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", bpe_metadata(pre), TENSORS)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name).backend_tokenizer.pre_tokenizer
    ours = backend_pre_tokenizer(KINDS[pre])
    for text in HARD_TEXTS + DIGITS:
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text), text


def test_qwen2_brings_a_text_to_normal_form_c(tmp_path: Path) -> None:
    tokenizer, _ = built(tmp_path, bpe_metadata("qwen2"))
    assert tokenizer.encode("e\u0301").ids == tokenizer.encode("\u00e9").ids


def test_a_file_that_names_no_kind_is_read_with_a_warning(tmp_path: Path, caplog) -> None:
    with caplog.at_level("WARNING"):
        tokenizer, _ = built(tmp_path, bpe_metadata(None))
    assert "names no pre-tokenizer" in caplog.text
    assert tokenizer.encode("12345").tokens == ["123", "4", "5"]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            bpe_metadata("unheard-of"),
            "tokenizer.ggml.pre='unheard-of' is not supported: one of codeshell, command-r,",
        ),
        ({"tokenizer.ggml.model": "gpt2"}, "no tokenizer.ggml.tokens"),
        (bpe_metadata(model="bert"), "tokenizer.ggml.model='bert' is not supported: gpt2"),
        (bpe_metadata(merges=["no way"]), "don't fit together"),
        (bpe_metadata(model="llama"), "tokenizer.ggml.scores is missing"),
        (bpe_metadata(tokens=[1, 2]), "tokenizer.ggml.tokens has to be an array of str"),
        (bpe_metadata(token_type=["x"]), "tokenizer.ggml.token_type has to be an array of int"),
    ],
)
def test_what_cannot_be_built_is_named(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as error:
        built(tmp_path, metadata)
    assert message in str(error.value) and "m.gguf" in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        gguf.tokenizer_data(tmp_path / "m.gguf", tmp_path)


def test_the_tokenizer_is_cached_and_made_again_where_it_is_damaged(tmp_path: Path) -> None:
    first, meta = built(tmp_path, bpe_metadata())
    stored = {p.name: p for p in (tmp_path / "cache").rglob("*.json")}
    assert set(stored) == {"tokenizer.json", "tokenizer_meta.json"}
    before = {name: p.stat().st_mtime_ns for name, p in stored.items()}
    again, meta_again = gguf.tokenizer_data(tmp_path / "m.gguf", tmp_path / "cache")
    assert again.to_str() == first.to_str() and meta_again == meta
    assert {name: p.stat().st_mtime_ns for name, p in stored.items()} == before
    for name, content in (("tokenizer.json", "{}"), ("tokenizer_meta.json", "[")):
        stored[name].write_text(content)
        again, meta_again = gguf.tokenizer_data(tmp_path / "m.gguf", tmp_path / "cache")
        assert again.to_str() == first.to_str() and meta_again == meta
        json.loads(stored[name].read_text())


SENTENCES = st.text(st.sampled_from("abc <s>é\n  1"), max_size=30) | st.sampled_from(HARD_TEXTS)


@given(text=SENTENCES)
@settings(max_examples=150, deadline=None)
def test_sentencepiece_merges_by_score(spm_tokenizer: Tokenizer, text: str) -> None:
    if any(token in text for token in SPECIAL):
        return
    ids = spm_tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == encode(text)
    assert spm_tokenizer.decode(ids) == text


@pytest.fixture(scope="module")
def spm_tokenizer(tmp_path_factory) -> Tokenizer:
    tokenizer, meta = built(tmp_path_factory.mktemp("spm"), spm_metadata())
    assert meta["add_bos"] is True and meta["bos_id"] == 1 and meta["eos_ids"] == [2]
    assert tokenizer.encode("a").ids[0] == 1
    return tokenizer


def test_sentencepiece_is_as_transformers_has_it(tmp_path: Path) -> None:
    ours, _ = built(tmp_path, spm_metadata())
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in HARD_TEXTS + DIGITS:
        # Transformers puts no space before a space, nor after a special token; llama.cpp does.
        if not text.startswith(" ") and not any(token in text for token in SPECIAL):
            ids = ours.encode(text).ids
            assert ids == theirs.encode(text), text
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == text


def test_sentencepiece_puts_a_space_after_a_special_token(spm_tokenizer: Tokenizer) -> None:
    ids = spm_tokenizer.encode(" a</s>b", add_special_tokens=False).ids
    assert ids == [*encode(" a"), 2, *encode("b")]


def test_no_space_is_put_before_a_text_where_the_file_says_so(tmp_path: Path) -> None:
    tokenizer, _ = built(tmp_path, {**spm_metadata(), "tokenizer.ggml.add_space_prefix": False})
    assert tokenizer.encode("ab", add_special_tokens=False).tokens == ["ab"]
    assert tokenizer.decode(tokenizer.encode(" ab").ids) == " ab"


def original_smollm2(metadata: dict[str, Any]) -> Tokenizer:
    """The recipe of SmolLM2's own tokenizer.json, on the vocabulary of the file."""
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ")) for m in metadata["tokenizer.ggml.merges"]]
    original = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    original.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    original.decoder = decoders.ByteLevel()
    special = [t for t, k in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True) if k == 3]
    original.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    return original


def test_the_default_models_tokenizer_is_the_original(default_model: Path, tmp_path: Path) -> None:
    ours, meta = gguf.tokenizer_data(default_model, tmp_path)
    original = original_smollm2(read_header(default_model).metadata)
    for text in HARD_TEXTS + DIGITS:
        ids = ours.encode(text).ids
        assert ids == original.encode(text).ids, text
        assert ours.decode(ids, skip_special_tokens=False) == text
        assert ours.decode(ids) == original.decode(ids)
    assert (meta["bos_id"], meta["eos_ids"], meta["add_bos"]) == (1, [2], False)
    assert meta["chat_template"].startswith("{% for message in messages %}")


@pytest.mark.slow
def test_the_default_models_tokenizer_is_as_transformers_has_it(default_model: Path, tmp_path: Path) -> None:
    ours, meta = gguf.tokenizer_data(default_model, tmp_path)
    theirs = AutoTokenizer.from_pretrained(default_model.parent, gguf_file=default_model.name)
    for text in HARD_TEXTS:
        ids = ours.encode(text).ids
        assert ids == theirs.encode(text), text
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    # Transformers knows no pre-tokenizer of the name smollm and splits as GPT-2 does, digits last.
    assert all(ours.encode(text).ids != theirs.encode(text) for text in DIGITS)
    assert meta["chat_template"] == theirs.chat_template
    assert (meta["bos_id"], meta["eos_ids"]) == (theirs.bos_token_id, [theirs.eos_token_id])
