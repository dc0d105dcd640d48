"""A tiny model with a tokenizer, and a few questions that fit into its context."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny import save_tiny

SUMS = [(2, 3), (7, 4), (10, 9), (6, 6), (1, 8), (20, 5), (3, 3)]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny") / "llama", "llama", tokenizer=True)


@pytest.fixture(scope="session")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lines = [
        json.dumps({"question": f"What is {a} and {b}?", "answer": f"{a}+{b}={a + b}\n#### {a + b}"})
        for a, b in SUMS
    ]
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    path.write_text("\n".join(lines) + "\n\n")
    return path
