"""The tokenizer that belongs to a model on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from piecework.errors import ModelError
from piecework.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from piecework.weights.source import Source

# A folder without any of these has no tokenizer, as a model with dummy weights may.
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)
_VARIABLES = {"bos_token": "bos_id", "eos_token": "eos_ids", "pad_token": "pad_id", "unk_token": "unk_id"}


def load_tokenizer(
    source: Source, cache_dir: str | os.PathLike[str] | None = None, chat_template: str | None = None
) -> Tokenizer | None:
    """Return the tokenizer of a model, or None where a folder has none.

    `chat_template` is the text of a template that is used instead of the model's. A GGUF file's tokenizer
    is parsed once and kept under `cache_dir`. Nothing that comes with the model is executed.

    Raises:
        ModelError: the tokenizer can't be read, or the given template is no valid Jinja.
    """
    if source.kind == "gguf":
        tokenizer = _from_gguf(source.path, cache_dir, chat_template)
    elif any((source.path / name).exists() for name in _FILES):
        tokenizer = _from_folder(source.path, chat_template)
    else:
        return None
    if chat_template is not None:
        tokenizer.check_chat_template()
    return tokenizer


def _from_gguf(path: Path, cache_dir: str | os.PathLike[str] | None, chat_template: str | None) -> Tokenizer:
    from piecework.weights.gguf import tokenizer_data

    backend, meta = tokenizer_data(path, cache_dir)
    known: dict[str, Any] = dict(meta)
    variables: dict[str, str] = {}
    for variable, key in _VARIABLES.items():
        token_id = known[key]
        if isinstance(token_id, list):
            token_id = token_id[0] if token_id else None
        if token_id is not None and (name := backend.id_to_token(token_id)) is not None:
            variables[variable] = name
    return Tokenizer(
        backend,
        bos_id=meta["bos_id"],
        eos_ids=meta["eos_ids"],
        chat_template=chat_template or meta["chat_template"],
        template_variables=variables,
    )


def _from_folder(path: Path, chat_template: str | None) -> Tokenizer:
    from transformers import AutoTokenizer

    try:
        # Without a network: the folder has all there is.
        found = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise plain Exception among others
        raise ModelError(f"{path}: the tokenizer can't be loaded: {error}") from error
    backend = getattr(found, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(
            f"{path}: the tokenizer {type(found).__name__} has no fast form; a tokenizer.json is needed"
        )
    return Tokenizer(
        backend,
        bos_id=found.bos_token_id,
        eos_ids=() if found.eos_token_id is None else (found.eos_token_id,),
        chat_template=chat_template or found.chat_template,
        template_variables=found.special_tokens_map,
    )
