"""The tokenizer inside a GGUF file, built once and kept in the cache.

Keys: the `tokenizer.*` section of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any, TypedDict

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE

from piecework.cache import try_read_json, try_write
from piecework.errors import ModelError
from piecework.weights.gguf.header import cached, read_header
from piecework.weights.gguf.pretokenize import (
    backend_normalizer,
    backend_pre_tokenizer,
    pre_tokenizer_kind,
)
from piecework.weights.gguf.special import BYTE, CONTROL, USER_DEFINED, end_ids, token_id

log = logging.getLogger(__name__)

TOKENIZER_VERSION = 1
_SPACE = "\u2581"  # sentencepiece writes a space like this


class TokenizerMeta(TypedDict):
    """What belongs to a tokenizer beside its vocabulary. `eos_ids`: every token that ends a generation."""

    bos_id: int | None
    eos_ids: list[int]
    pad_id: int | None
    unk_id: int | None
    add_bos: bool
    add_eos: bool
    chat_template: str | None


def tokenizer_data(
    path: str | os.PathLike[str], cache_dir: str | os.PathLike[str] | None = None
) -> tuple[Tokenizer, TokenizerMeta]:
    """The tokenizer of a GGUF file and the ids and chat template that go with it.

    The tokenizer's post-processor adds the bos (eos) token where `add_bos` (`add_eos`) is set. Raises
    ModelError for a file without a tokenizer or with a kind that is not supported.
    """
    file = Path(path)
    if not file.is_file():
        raise ModelError(f"{file}: no such file")
    stored = cached(file, cache_dir, "tokenizer.json", TOKENIZER_VERSION)
    stored_meta = stored.with_name("tokenizer_meta.json")
    meta: TokenizerMeta | None = try_read_json(stored_meta)
    if meta is not None and stored.is_file():
        try:
            return Tokenizer.from_file(str(stored)), meta
        except Exception as error:  # the package raises plain Exception for a damaged file
            log.warning("the cache file %s is damaged (%s); it is made again", stored, error)
    metadata = read_header(file).metadata
    try:
        tokenizer, meta = build_tokenizer(metadata)
    except ModelError as error:
        raise ModelError(f"{file}: {error}") from error
    try_write(stored, tokenizer.to_str())
    try_write(stored_meta, json.dumps(meta))  # last: its presence says that both are there
    return tokenizer, meta


def build_tokenizer(metadata: dict[str, Any]) -> tuple[Tokenizer, TokenizerMeta]:
    """Build a tokenizer from the metadata of a GGUF file, vocabulary included."""
    tokens: list[str] = _listed(metadata, "tokens", str)
    model = metadata.get("tokenizer.ggml.model")
    if not tokens:
        raise ModelError("the file has no tokenizer (no tokenizer.ggml.tokens)")
    if model == "gpt2":
        tokenizer, add_bos = _byte_level(metadata, tokens)
    elif model == "llama":
        tokenizer, add_bos = _sentencepiece(metadata, tokens), True
    else:
        raise ModelError(f"tokenizer.ggml.model={model!r} is not supported: gpt2 (byte-level BPE) or llama")
    kinds: list[int] = _listed(metadata, "token_type", int)
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        chosen = [t for t, k in zip(tokens, kinds, strict=False) if k == kind and t]
        tokenizer.add_tokens([AddedToken(t, normalized=False, special=special) for t in chosen])
    meta = _meta(metadata, add_bos)
    _add_ends(tokenizer, tokens, meta)
    return tokenizer, meta


def _listed(metadata: dict[str, Any], name: str, kind: type) -> list[Any]:
    """An array of the metadata, all of one type; empty where there is none."""
    values = metadata.get(f"tokenizer.ggml.{name}") or []
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise ModelError(f"tokenizer.ggml.{name} has to be an array of {kind.__name__}")
    return values


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    vocabulary = {token: index for index, token in reversed(list(enumerate(tokens)))}
    if len(vocabulary) < len(tokens):
        log.warning("%d tokens of the GGUF file are doubles of others", len(tokens) - len(vocabulary))
    return vocabulary


def _byte_level(metadata: dict[str, Any], tokens: list[str]) -> tuple[Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre")
    if name is None:
        log.warning("the GGUF file is old and names no pre-tokenizer; texts may be split wrongly")
    kind = pre_tokenizer_kind(name or "default")
    # "a b": two tokens; the first may itself begin with a space.
    cuts = ((m, m.find(" ", 1)) for m in _listed(metadata, "merges", str))
    merges = [(m[:cut], m[cut + 1 :]) for m, cut in cuts]
    tokenizer = _with_model(BPE, vocab=_vocabulary(tokens), merges=merges, ignore_merges=kind.whole_words)
    tokenizer.pre_tokenizer = backend_pre_tokenizer(kind)
    tokenizer.decoder = decoders.ByteLevel()
    if kind.nfc:
        tokenizer.normalizer = backend_normalizer(kind)
    return tokenizer, kind.add_bos


def _sentencepiece(metadata: dict[str, Any], tokens: list[str]) -> Tokenizer:
    """BPE over characters, bytes as the last resort: the sentencepiece models of Llama 2 and Mistral."""
    scores: list[float] = _listed(metadata, "scores", float)
    if len(scores) != len(tokens):
        raise ModelError("tokenizer.ggml.scores is missing or not as long as tokenizer.ggml.tokens")
    unknown = token_id(metadata, "unknown") or 0
    tokenizer = _with_model(
        BPE,
        vocab=_vocabulary(tokens),
        merges=_merges_of_scores(tokens, scores, _listed(metadata, "token_type", int)),
        unk_token=tokens[unknown] if unknown < len(tokens) else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    # As llama.cpp and the tokenizer.json of Llama 2: a space before each text, also one that begins with
    # a space, and again after a special token.
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _with_model(model: type[BPE], **settings: Any) -> Tokenizer:
    try:
        return Tokenizer(model(**settings))
    except Exception as error:  # the package raises plain Exception, for example for a merge of no token
        raise ModelError(f"the vocabulary and merges don't fit together: {error}") from error


def _merges_of_scores(tokens: list[str], scores: list[float], kinds: list[int]) -> list[tuple[str, str]]:
    """The merges that a scored vocabulary stands for: each cut of a token into two, best score first.

    Sentencepiece merges the pair whose result has the best score; so a merge's rank is its result's score.
    """
    if len(kinds) == len(tokens):
        pieces = {t: i for i, t in enumerate(tokens) if kinds[i] not in (CONTROL, BYTE)}
    else:
        pieces = {t: i for i, t in enumerate(tokens)}
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, index in pieces.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in pieces and right in pieces:
                ranked.append((-scores[index], pieces[left], pieces[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _meta(metadata: dict[str, Any], add_bos: bool) -> TokenizerMeta:
    return {
        "bos_id": token_id(metadata, "bos"),
        "eos_ids": end_ids(metadata),
        "pad_id": token_id(metadata, "padding"),
        "unk_id": token_id(metadata, "unknown"),
        "add_bos": bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos)),
        "add_eos": bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        "chat_template": metadata.get("tokenizer.chat_template"),
    }


def _add_ends(tokenizer: Tokenizer, tokens: list[str], meta: TokenizerMeta) -> None:
    """Let encoding add the bos and eos tokens, where the file says so and names them."""
    bos = meta["bos_id"] if meta["add_bos"] else None
    eos = meta["eos_ids"][0] if meta["add_eos"] and meta["eos_ids"] else None
    if bos is None and eos is None:
        return
    first = [] if bos is None else [tokens[bos]]
    last = [] if eos is None else [tokens[eos]]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *last, *first, "$B:1", *last],
        special_tokens=[(tokens[i], i) for i in (bos, eos) if i is not None],
    )
