"""Qwen3-14B through a worker process gives the tokens that are known of it, where the model is at hand.

    PIECEWORK_QWEN3_14B=/models/Qwen3-14B pytest -m slow tests/e2e/test_qwen3_14b.py

It takes 30 GB of the device, or of memory: the first GPU, an NPU where torch_npu is, else the CPU.
PIECEWORK_QWEN3_14B_DEVICE names another one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tiny import save_tiny

from piecework import LLM
from piecework.engine.result import Result
from piecework.models.config import ModelConfig
from piecework.workers.serving.runner import Context

FOLDER, DEVICE = "PIECEWORK_QWEN3_14B", "PIECEWORK_QWEN3_14B_DEVICE"
PROMPT = "Huawei is"
TOKENS, TEXT = [264, 8453, 2813, 13, 576], " a Chinese company. The"


def complete(
    folder: str, device: str, workers: str, prompt: str | Sequence[int], length: int = 512
) -> tuple[Result, str, ModelConfig, Context]:
    """Five greedy tokens in bfloat16, their text as the tokenizer has it, and who made them."""
    settings = {"dtype": "bfloat16", "max_model_len": length, "num_pages": 64, "start_timeout": 3600.0}
    with LLM(folder, device=device, workers=workers, **settings) as llm:
        (result,) = llm.generate([prompt], temperature=0.0, max_tokens=5)
        assert llm.service.max_model_len == length
        tokenizer = llm.service.tokenizer
        assert tokenizer is not None, "a text can be told"
        (worker,) = llm.service.workers()
        return result, tokenizer.decode(result.token_ids), llm.service.model_config, worker


def accelerator() -> str:
    """The device to run on; see above."""
    if named := os.environ.get(DEVICE):
        return named
    if torch.cuda.is_available():
        return "cuda"
    return "npu" if find_spec("torch_npu") else "cpu"


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.skipif(not os.environ.get(FOLDER), reason=f"{FOLDER} names no folder with Qwen3-14B")
def test_the_known_tokens() -> None:
    folder = os.environ[FOLDER]
    assert Path(folder).is_dir(), f"{FOLDER}={folder} is no folder"
    result, text, model, worker = complete(folder, accelerator(), "process", PROMPT)
    assert (model.num_layers, model.hidden_size) == (40, 5120), f"{folder} holds another model"
    assert worker.kind == "process" and worker.pid != os.getpid()
    assert result.error is None
    assert (result.token_ids, result.text, result.finish_reason) == (TOKENS, TEXT, "length")
    assert text == TEXT and result.usage.completion_tokens == 5


def test_a_small_qwen3_goes_the_same_way(tmp_path: Path) -> None:
    """What the test above does, so that it is not run for the first time where the model is."""
    folder = str(save_tiny(tmp_path, "qwen3", tokenizer=True))
    found = [complete(folder, "cpu", workers, PROMPT, 128) for workers in ("inline", "process")]
    (inline, *_), (result, text, model, worker) = found
    assert worker.kind == "process" and worker.pid != os.getpid() and model.num_layers == 3
    assert result.token_ids == inline.token_ids and len(result.token_ids) == 5
    assert (result.text, result.finish_reason, result.error) == (inline.text, "length", None)
    assert text.startswith(result.text), "half a character at the end is not told"
