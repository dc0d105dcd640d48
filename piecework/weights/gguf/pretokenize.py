"""How byte-level BPE splits a text before merging, by the `tokenizer.ggml.pre` of a GGUF file.

The names and what they stand for are llama.cpp's (src/llama-vocab.cpp); the split of each name is that
of the tokenizer.json which the models of this name were trained with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers

from piecework.errors import ModelError

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|{_LEAD}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = rf"{_CONTRACTION}|{_LEAD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_TEKKEN = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_GPT4O = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)


@dataclass(frozen=True)
class PreTokenizer:
    """`patterns` split the text one after the other. The flags say what else goes with the kind.

    `whole_words`: a piece that is a token is taken whole, without merging ("ignore_merges").
    `add_bos`: a text begins with the beginning-of-sequence token unless the file says otherwise.
    `nfc`: the text is brought to Unicode normal form C first.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False
    nfc: bool = False


_KINDS: tuple[tuple[tuple[str, ...], PreTokenizer], ...] = (
    # What llama.cpp does with a file that names no kind.
    (("default",), PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))),
    (("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "trillion", "mellum"), PreTokenizer((_GPT2,))),
    (
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        PreTokenizer((r"\p{N}", _GPT2)),
    ),
    (
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        PreTokenizer((_LLAMA3,), whole_words=True, add_bos=True),
    ),
    (("dbrx", "smaug-bpe"), PreTokenizer((_LLAMA3,))),
    (("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"), PreTokenizer((_QWEN2,), nfc=True)),
    (("stablelm2",), PreTokenizer((_QWEN2,))),
    (("tekken",), PreTokenizer((_TEKKEN,), whole_words=True, add_bos=True)),
    (("gpt-4o", "llama4", "kanana2"), PreTokenizer((_GPT4O,))),
    (
        ("falcon",),
        PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    ),
)
KINDS: dict[str, PreTokenizer] = {name: kind for names, kind in _KINDS for name in names}


def pre_tokenizer_kind(name: str) -> PreTokenizer:
    """The kind of this name; an unknown one is a ModelError that lists the known ones."""
    if name not in KINDS:
        raise ModelError(f"tokenizer.ggml.pre={name!r} is not supported: one of {', '.join(sorted(KINDS))}")
    return KINDS[name]


def backend_pre_tokenizer(kind: PreTokenizer) -> Any:
    """The kind's splits and the byte alphabet, as a pre-tokenizer of the `tokenizers` package."""
    splits = [pre_tokenizers.Split(Regex(p), behavior="isolated") for p in kind.patterns]
    return pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def backend_normalizer(kind: PreTokenizer) -> Any:
    """The kind's normalizer, or None."""
    return normalizers.NFC() if kind.nfc else None
