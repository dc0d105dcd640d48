"""Tokenizers from model folders and GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import chat_templates
import pytest
from tokenizers import Tokenizer as Backend

from piecework.errors import ModelError
from piecework.tokenizer.load import load_tokenizer
from piecework.weights.source import Source

CHAT = [{"role": "user", "content": "Hi"}]


def write_folder(path: Path, backend: Backend, **config: Any) -> Source:
    """A tokenizer as model folders have it."""
    path.mkdir(exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return Source("folder", path)


def test_a_folders_tokenizer(tmp_path: Path, byte_level_backend: Backend) -> None:
    from transformers import AutoTokenizer

    source = write_folder(
        tmp_path,
        byte_level_backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        chat_template=chat_templates.LLAMA3_LIKE,
    )
    tokenizer = load_tokenizer(source)
    assert tokenizer is not None
    theirs = AutoTokenizer.from_pretrained(str(tmp_path))
    assert tokenizer.bos_id == theirs.bos_token_id == 1
    assert tokenizer.eos_ids == (2,)
    assert tokenizer.encode("naïve 日本語") == theirs.encode("naïve 日本語")
    prompt = tokenizer.chat_prompt(CHAT)
    assert prompt == theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert prompt.startswith("<|im_start|>")


def test_a_template_in_a_file_of_its_own(tmp_path: Path, byte_level_backend: Backend) -> None:
    source = write_folder(tmp_path, byte_level_backend)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    tokenizer = load_tokenizer(source)
    assert tokenizer is not None
    assert tokenizer.chat_prompt(CHAT) == "Hi!"


def test_a_given_template_replaces_the_models(tmp_path: Path, byte_level_backend: Backend) -> None:
    source = write_folder(tmp_path, byte_level_backend, chat_template=chat_templates.SMOLLM2)
    tokenizer = load_tokenizer(source, chat_template="{{ messages[0].content }}?")
    assert tokenizer is not None
    assert tokenizer.chat_prompt(CHAT) == "Hi?"
    with pytest.raises(ModelError, match="chat_template"):
        load_tokenizer(source, chat_template="{% for %}")


def test_a_folder_without_tokenizer_or_template(tmp_path: Path, sentencepiece_backend: Backend) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert load_tokenizer(Source("folder", tmp_path)) is None
    tokenizer = load_tokenizer(write_folder(tmp_path, sentencepiece_backend))
    assert tokenizer is not None
    assert not tokenizer.has_chat_template
    assert tokenizer.bos_id is None and tokenizer.eos_ids == ()


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ModelError, match=str(tmp_path)):
        load_tokenizer(Source("folder", tmp_path))


def test_a_gguf_files_tokenizer(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    alphabet = sorted(set(chat_templates.SMOLLM2) - set(" \n"))
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "Ġ", "Ċ", "Ã", "©"]
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges([])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{{ bos_token }}" + chat_templates.SMOLLM2 + "{{ eos_token }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for _ in range(2):  # from the file, then from the cache
        tokenizer = load_tokenizer(Source("gguf", tmp_path / "m.gguf"), cache_dir=tmp_path / "cache")
        assert tokenizer is not None
        assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, (2,))
        ids = tokenizer.encode("so é")
        assert ids[0] == 1 and tokenizer.decode(ids) == "so é"
        prompt = tokenizer.chat_prompt(CHAT, add_generation_prompt=False)
        assert prompt.startswith("<|im_start|><|im_start|>system\n") and prompt.endswith(
            "Hi<|im_end|>\n<|im_end|>"
        )
