"""Small tokenizers of every kind that the package knows, trained on a few sentences."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SENTENCES = [
    "The capital of France is Paris, and the river is the Seine.",
    "Once upon a time there was a naïve café in Zürich.",
    "日本語 and 한국어 and emoji 😀🎉 are text too.",
    "def add(a, b):\n    return a + b  # indented by four",
]


def byte_level() -> Tokenizer:
    """Byte-level BPE as in GPT-2, with special tokens of ChatML, an added plain token and no bos."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES * 10, trainer)
    tokenizer.add_tokens([AddedToken("<tool 工具>", normalized=False)])
    return tokenizer


def sentencepiece() -> Tokenizer:
    """BPE with byte fallback and a bos token, as in Llama 2."""
    special = ["<unk>", "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()  # so that no token grows beyond a word
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        special_tokens=[*special, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    tokenizer.train_from_iterator([SENTENCES[0], SENTENCES[1]] * 10, trainer)
    # The trainer makes every special token special; bytes are ordinary tokens.
    tokenizer = Tokenizer.from_str(without_added_bytes(tokenizer))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def without_added_bytes(tokenizer: Tokenizer) -> str:
    import json

    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if not token["content"].startswith("<0x")]
    return json.dumps(data)


def metaspace() -> Tokenizer:
    """Unigram with a Metaspace decoder, as in T5."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES * 10, trainer)
    return tokenizer


def wordpiece() -> Tokenizer:
    """A decoder of no known family."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=150, special_tokens=["[UNK]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES * 10, trainer)
    return tokenizer


MAKERS = {f.__name__: f for f in (byte_level, sentencepiece, metaspace, wordpiece)}


@pytest.fixture(scope="session")
def backends() -> dict[str, Tokenizer]:
    """All of them, by name."""
    return {name: make() for name, make in MAKERS.items()}


@pytest.fixture(scope="session")
def byte_level_backend(backends: dict[str, Tokenizer]) -> Tokenizer:
    """A byte-level tokenizer, without bos."""
    return backends["byte_level"]


@pytest.fixture(scope="session")
def sentencepiece_backend(backends: dict[str, Tokenizer]) -> Tokenizer:
    """A tokenizer with byte fallback, which adds bos."""
    return backends["sentencepiece"]
