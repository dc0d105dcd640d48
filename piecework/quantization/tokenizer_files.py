"""Puts a model's tokenizer and generation settings into the folder of a new checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from piecework.weights.checkpoint import Checkpoint
from piecework.weights.source import Source

_PATTERNS = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
    "*.model",
    "tekken.json",
    "LICENSE*",
)


def copy_beside(source: Source, checkpoint: Checkpoint, folder: Path, cache_dir: str | None = None) -> None:
    """Copy what a folder has beside its weights, or write what a GGUF file holds of it, into `folder`."""
    if source.kind == "folder":
        for pattern in _PATTERNS:
            for path in sorted(source.path.glob(pattern)):
                if path.is_file() and not (folder / path.name).exists():
                    shutil.copyfile(path, folder / path.name)
        return
    from piecework.weights.gguf import tokenizer_data

    backend, meta = tokenizer_data(source.path, cache_dir)
    backend.save(str(folder / "tokenizer.json"))
    tokens: dict[str, int | None] = {
        "bos_token": meta["bos_id"],
        "eos_token": next(iter(meta["eos_ids"]), None),
        "pad_token": meta["pad_id"],
        "unk_token": meta["unk_id"],
    }
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    config |= {name: backend.id_to_token(own) for name, own in tokens.items() if own is not None}
    if meta["chat_template"] is not None:
        config["chat_template"] = meta["chat_template"]
    _write_json(folder / "tokenizer_config.json", config)
    generation = dict(checkpoint.generation_config)
    if meta["eos_ids"]:
        generation["eos_token_id"] = list(meta["eos_ids"])
    if generation:
        _write_json(folder / "generation_config.json", generation)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
